"""The chat page at `/`: one file that asks nobody but this endpoint. Apart from the app, which only sends it."""

import base64
import functools
import hashlib
import re
from pathlib import Path

FILE = Path(__file__).with_name("chat_page.html")


@functools.cache
def page() -> tuple[bytes, dict[str, str]]:
    """The page, and headers by which a browser runs its own script and style alone, and connects to nothing but this origin."""
    text = FILE.read_text("utf-8")
    allowed = {name: _digest(text, name) for name in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def _digest(text: str, name: str) -> str:
    """As a policy names an inline element: by the SHA-256 of what stands in it."""
    found = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    assert found is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"
