"""Compositions that were made before. Apart, because composing costs more than all the rest of a run that has nothing to do (0.3 s of CPU,
most of it Hydra's import), and gives the same for the same files, words and code.

What is kept is JSON, and read back through the same dataclasses, so that every check in them runs again. A composition that asks its
surroundings (a resolver such as `oc.env`) is never kept.
"""

import contextlib
import dataclasses
import enum
import hashlib
import importlib
import importlib.metadata
import json
import os
import re
from pathlib import Path
from typing import Any

KEPT = 200
RESOLVER = re.compile(rb"\$\{\s*[\w.]+\s*:")
KIND = "="
"""Key that holds `module:Class` of a dataclass or an enum, or the word for a map whose keys are no texts (JSON has none)."""
PAIRS = "map"
OURS = ("pipelines.", "stages.")


def key(root: Path, conf: Path | None, overrides: list[str]) -> str | None:
    """What a composition depends on, as one digest: the words, every YAML file, our code, Hydra's version. None for one that asks its
    surroundings."""
    words = json.dumps([overrides, str(conf)]).encode()
    found = hashlib.sha256(words)
    if RESOLVER.search(words):
        return None
    places = [(root / "conf", "*.yaml"), (root / "pipelines", "*.py"), (root / "stages", "*.py")]
    for directory, pattern in [*places, *([(conf, "*.yaml")] if conf else [])]:
        for path in sorted(directory.rglob(pattern)):
            text = path.read_bytes()
            if pattern == "*.yaml" and RESOLVER.search(text):
                return None
            found.update(f"\0{path.relative_to(directory)}\0{len(text)}\0".encode())
            found.update(text)
    for name in ("hydra-core", "omegaconf"):
        found.update(importlib.metadata.version(name).encode())
    return found.hexdigest()


def load(directory: Path, name: str) -> Any:
    """The composition kept under a key, or None. Raises ValueError as composing does."""
    try:
        kept = json.loads((directory / f"{name}.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return _read(kept)


def keep(directory: Path, name: str, app: Any) -> None:
    """Keep a composition; the oldest of many goes. A place that cannot be written, or a class from elsewhere, keeps nothing."""
    with contextlib.suppress(OSError, TypeError):
        directory.mkdir(parents=True, exist_ok=True)
        partial = directory / f".{name}.{os.getpid()}"
        partial.write_text(json.dumps(_write(app)), "utf-8")
        partial.replace(directory / f"{name}.json")
        for old in sorted(directory.glob("?" * 64 + ".json"), key=lambda p: p.stat().st_mtime_ns, reverse=True)[KEPT:]:
            old.unlink(missing_ok=True)


def _write(value: Any) -> Any:
    kind = f"{type(value).__module__}:{type(value).__qualname__}"
    if (isinstance(value, enum.Enum) or dataclasses.is_dataclass(value)) and not kind.startswith(OURS):
        raise TypeError(f"{kind} is not ours to find again")
    if isinstance(value, enum.Enum):
        return {KIND: kind, "name": value.name}
    if dataclasses.is_dataclass(value):
        return {KIND: kind} | {f.name: _write(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        if all(isinstance(name, str) for name in value):
            return {name: _write(item) for name, item in value.items()}
        return {KIND: PAIRS, "items": [[name, _write(item)] for name, item in value.items()]}
    if isinstance(value, list):
        return [_write(item) for item in value]
    return value


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(item) for item in value]
    if not isinstance(value, dict):
        return value
    if KIND not in value:
        return {name: _read(item) for name, item in value.items()}
    if value[KIND] == PAIRS:
        return {name: _read(item) for name, item in value["items"]}
    module, _, name = value[KIND].partition(":")
    if not module.startswith(OURS):
        raise LookupError(f"a kept composition names {module}")
    cls = getattr(importlib.import_module(module), name)
    if issubclass(cls, enum.Enum):
        return cls[value["name"]]
    return cls(**{field: _read(item) for field, item in value.items() if field != KIND})
