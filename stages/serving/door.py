"""Who may come in, and what a request says about itself in its headers: keys, origins, ids, deadlines. Apart from the app, so that
what protects an endpoint is read on one page."""

import hmac
import re
import time
import uuid
from collections.abc import Sequence

from stages.serving.asgi import Scope, header
from stages.serving.options import key_digest
from stages.serving.protocol import ApiError

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
DEADLINE = "x-request-timeout-seconds"
PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, OPTIONS",
    "access-control-allow-headers": f"authorization, content-type, x-request-id, {DEADLINE}",
    "access-control-max-age": "600",
}


def require_key(scope: Scope, digests: Sequence[str]) -> None:
    """ApiError 401 unless the request carries one of the keys, as `Authorization: Bearer KEY`. No keys: all are let in."""
    if not digests:
        return
    scheme, _, key = (header(scope, b"authorization") or "").partition(" ")
    shown = key_digest(key.strip()) if scheme.lower() == "bearer" else ""
    # Every key is compared, and each in constant time: how long it takes tells nothing.
    if not any([hmac.compare_digest(shown, digest) for digest in digests]):
        message = "no key was given" if not key else "the key is not one of this endpoint's"
        raise ApiError(
            401,
            f"{message}: send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def cors_headers(scope: Scope, origins: Sequence[str]) -> dict[str, str]:
    """What lets a page of a named origin read the answer; nothing for others. Never `*`, never with cookies."""
    if not origins:
        return {}
    origin = header(scope, b"origin")
    if origin not in origins:
        return {"vary": "Origin"}
    return {
        "vary": "Origin",
        "access-control-allow-origin": str(origin),
        "access-control-expose-headers": "x-request-id, x-model-version, x-model-digest",
    }


def request_id(scope: Scope) -> str:
    """The client's own, when it is one, else a new one."""
    given = header(scope, b"x-request-id") or ""
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def deadline(scope: Scope, longest_s: float) -> float:
    """`time.monotonic()` at which the answer is no longer wanted: the server's limit, or sooner where the client says so."""
    asked = header(scope, DEADLINE.encode())
    seconds = longest_s
    if asked is not None:
        if not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", asked) or float(asked) <= 0:
            raise ApiError(400, f"{DEADLINE} must be seconds above 0, such as 10 or 2.5", param=DEADLINE)
        seconds = min(longest_s, float(asked))
    return time.monotonic() + seconds
