"""Calls a stage function without the orchestrator: a context whose tracker and registry keep nothing. Apart, because
several benches compare with, or consist of, such a bare call."""

from pathlib import Path
from typing import Any

from stages.contract import Context


class Silent:
    """A tracker and a registry that keep nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def context(output: Path, work: Path, fingerprint: str = "0" * 64) -> Context:
    """A context of two existing directories."""
    return Context(
        output=output,
        work=work,
        state=work,
        fingerprint=fingerprint,
        seed=0,
        tracker=Silent(),
        registry=Silent(),
        progress=lambda fraction, text: None,
        headline=lambda text: None,
    )
