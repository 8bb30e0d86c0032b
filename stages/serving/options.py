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
    max_batch: int = 8
    """Answers that grow at once."""
    max_batch_tokens: int = 16_384
    """Tokens that the cache may come to hold: answers at once times the longest of them, prompt included."""
    prefill_chunk: int = 64
    """Tokens of a prompt that are read between two tokens of the answers that grow meanwhile."""
    max_queue: int = 64
    """Requests that may wait besides."""
    request_timeout_s: float = 120.0
    max_body_bytes: int = 1_000_000
    key_digests: tuple[str, ...] = ()
    """SHA-256 (64 hex characters) of each key that is let in; none: no key is asked for."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may read answers, such as https://app.example.com."""
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("key_digests", "cors_origins"):  # lists where they were read from JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))

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


def key_digest(key: str) -> str:
    """What is kept of a key: keys are long random strings, so that nobody finds one from its SHA-256."""
    return hashlib.sha256(key.encode()).hexdigest()
