"""What an endpoint is and how it serves: identity and options. Apart, because the verbs need them without torch."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Options of a server. `digest` covers all of them but `threads`, which changes no answer."""

    max_tokens: int | None = None
    """Most tokens of one answer; None: what the context leaves."""
    max_queue: int = 64
    request_timeout_s: float = 120.0
    max_body_bytes: int = 1_000_000
    threads: int = 1

    def digest(self) -> str:
        """64 hex characters."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if name != "threads"}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Identity:
    """What /ready reports: which model in which version, with which options, in which deployment."""

    model: str
    version: int
    digest: str
    config_digest: str
    instance: str

    def fields(self) -> dict[str, str | int]:
        return dataclasses.asdict(self)

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: changes when model or options do."""
        return f"{self.model}@{self.version}-{self.config_digest[:8]}"
