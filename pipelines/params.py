"""What MLflow's table of params shows of a stage's config: the fields that somebody chose. Apart from `pipelines/tracking.py`, because a
run makes them and must not load MLflow for it.
"""

import dataclasses
import hashlib
import json
from typing import Any

from pipelines.config import plain
from stages.contract import StageConfig

PARAM_LIMIT = 500
"""MLflow cuts values over 6,000 characters without a word; longer ones than this are shown by their beginning and digest."""


def changed_params(cfg: StageConfig) -> dict[str, str]:
    """Flat name -> value of the fields that differ from their defaults (and those that have none)."""
    params: dict[str, str] = {}

    def visit(value: Any, where: str) -> None:
        for f in dataclasses.fields(value):
            item, name = getattr(value, f.name), f"{where}{f.name}"
            default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
            if item == default or name == "inputs":
                continue
            if dataclasses.is_dataclass(item):
                visit(item, f"{name}.")
            else:
                params[name] = _shown(plain(item))

    visit(cfg, "")
    return params


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= PARAM_LIMIT:
        return text
    return f"{text[:200]}... ({len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}; whole in config.json)"
