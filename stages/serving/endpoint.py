"""The record of the live endpoint and the one question to it that costs nothing. Apart and standard library only, because
a plan asks it too and must load nothing heavy."""

import json
import os
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stages.contract import StageError
from stages.serving.options import ServingOptions, key_digest

RECORD = "endpoint.json"
ASK_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """All that is needed to say what serves, and to deploy exactly that again."""

    application: str
    base_url: str
    """Scheme, host and port; the OpenAI interface is below it at /v1."""
    model: str
    version: int
    digest: str
    config_digest: str
    instance: str
    """Names this one deployment: 32 hex characters."""
    uri: str
    """Where the model's files are: resolved once, never an alias, so that a restarted replica loads the same. Each replica
    reads its node's own copy."""
    num_cpus: float
    options: ServingOptions
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; its value is kept nowhere."""

    def summary(self) -> dict[str, Any]:
        """The facts of an Endpoint artifact."""
        names = ("base_url", "model", "version", "digest", "config_digest", "instance", "api_key_env")
        return {name: getattr(self, name) for name in names}

    def serves(self, answer: dict[str, Any] | None) -> bool:
        """`answer` of /ready is this model version under these options (in this or another deployment)."""
        names = ("model", "version", "digest", "config_digest")
        return answer is not None and all(answer.get(name) == getattr(self, name) for name in names)


def write_record(state: Path, deployed: Deployed) -> None:
    """Replace the record in one step."""
    path = state / RECORD
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(deployed), indent=2, sort_keys=True) + "\n", "utf-8")
    partial.replace(path)


def read_record(state: Path) -> Deployed | None:
    """What was deployed last, or None when nothing (readable) is recorded."""
    try:
        fields = json.loads((state / RECORD).read_text("utf-8"))
        return Deployed(**{**fields, "options": ServingOptions(**fields["options"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def ask_ready(base_url: str, timeout_s: float = ASK_TIMEOUT_S) -> dict[str, Any] | None:
    """What /ready reports, or None when nothing that is ready answers there."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through the environment's proxy
    try:
        with opener.open(f"{base_url}/ready", timeout=timeout_s) as response:
            answer = json.loads(response.read(65536))
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


def key_digests(api_key_env: str | None) -> tuple[str, ...]:
    """Of the keys that an environment variable names, parted by commas; StageError when it is not set. None: no key is wanted."""
    if api_key_env is None:
        return ()
    keys = [key.strip() for key in os.environ.get(api_key_env, "").split(",") if key.strip()]
    if not keys:
        raise StageError(
            f"stages.deploy.api_key_env: the environment variable {api_key_env} is not set; put the endpoint's key into it "
            "(several parted by commas), or set the field to null"
        )
    return tuple(key_digest(key) for key in keys)


def client_key(api_key_env: str | None) -> str:
    """The key that our own requests to an endpoint send: the first one of the variable; a placeholder where none is wanted."""
    keys = os.environ.get(api_key_env, "") if api_key_env else ""
    return next((key.strip() for key in keys.split(",") if key.strip()), "none")
