"""The identity of a stage's result: everything that can change it, and nothing else. Apart, because all reuse rests on it.

`payload` gathers the facets (config, seed, inputs' content, sources, code, library versions); `digest` hashes its canonical
JSON; `difference` says in words how two payloads differ. Store root, host, device, run id and `resources` never enter.
"""

import ast
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.config import plain
from stages.contract import Stage, StageConfig

SCHEMA = 1
"""Version of the payload's form; raising it re-runs everything."""

PACKAGE_ROOT = Path(__file__).resolve().parent.parent


def payload(
    stage: Stage, cfg: StageConfig, seed: int, inputs: Mapping[str, str], sources: Mapping[str, str]
) -> dict[str, Any]:
    """All facets of a stage's identity. `inputs`: parameter -> content digest of the artifact handed in."""
    config = _identity(cfg)
    for execution in ("inputs", "resources"):
        config.pop(execution, None)
    return {
        "schema": SCHEMA,
        "stage": stage.name,
        "config": config,
        "seed": seed,
        "inputs": dict(inputs),
        "sources": dict(sources),
        "code": code_digests(stage.function.__module__),
        "env": {"python": ".".join(platform.python_version_tuple()[:2]), **versions(stage.libraries)},
    }


def _identity(cfg: Any) -> dict[str, Any]:
    """The config as plain values, without the fields that only say where something is (`contract.location`)."""
    values = {}
    for f in dataclasses.fields(cfg):
        if f.metadata.get("identity", True):
            item = getattr(cfg, f.name)
            values[f.name] = _identity(item) if dataclasses.is_dataclass(item) else plain(item)
    return values


def digest(facets: Mapping[str, Any]) -> str:
    """sha256 of the canonical JSON, 64 hex characters."""
    return hashlib.sha256(canonical(facets).encode()).hexdigest()


def canonical(value: Any) -> str:
    """JSON with sorted keys and no white space. TypeError for what has no stable form (sets, paths, callables, NaN)."""
    _require_stable(value, "payload")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Field by field, in words: `config.learning_rate 0.0002 -> 0.0001`, `code stages/training/loop.py`."""
    lines = []
    before, after = dict(_leaves(old, "")), dict(_leaves(new, ""))
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key, "absent"), after.get(key, "absent")
        if was == now:
            continue
        facet, _, rest = key.partition(".")
        if facet == "code":
            change = "changed" if "absent" not in (was, now) else ("added" if was == "absent" else "removed")
            lines.append(f"code {rest} {change}")
        elif facet in ("inputs", "sources"):
            lines.append(f"{facet}.{rest} {str(was)[:12]} -> {str(now)[:12]}")
        else:
            lines.append(f"{key} {_short(was)} -> {_short(now)}")
    return lines


@functools.cache
def code_digests(module: str) -> dict[str, str]:
    """File -> digest of its normalised AST, for a module and the first-party modules it imports, directly or not."""
    found: dict[str, str] = {}
    waiting = [module]
    seen = set()
    while waiting:
        name = waiting.pop()
        path = _source(name)
        if name in seen or path is None:
            continue
        seen.add(name)
        tree = ast.parse(path.read_text("utf-8"))
        waiting += _first_party_imports(tree)
        found[path.relative_to(PACKAGE_ROOT).as_posix()] = hashlib.sha256(normalised(tree).encode()).hexdigest()[:16]
    return dict(sorted(found.items()))


def normalised(tree: ast.AST) -> str:
    """The tree's dump without positions and docstrings (comments are not in it): what the code means, not how it looks."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [n for n in body if not _is_docstring(n)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.dump(tree, annotate_fields=False, include_attributes=False)


@functools.cache
def _version(distribution: str) -> str:
    return importlib.metadata.version(distribution)


def versions(distributions: tuple[str, ...]) -> dict[str, str]:
    """Distribution -> installed version."""
    return {name: _version(name) for name in distributions}


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _first_party_imports(tree: ast.AST) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names if alias.name.startswith("stages.")]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module and node.module.startswith("stages"):
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def _source(module: str) -> Path | None:
    """The file of a `stages` module, or None for names that are no module of ours."""
    # The contract and the artifact types are how stages are declared, not what they compute.
    if not module.startswith("stages.") or module in ("stages.contract", "stages.artifacts"):
        return None
    base = PACKAGE_ROOT.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _require_stable(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: key {key!r} is not text and has no stable form")
            _require_stable(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_stable(item, f"{where}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"{where}: {value} has no stable form")
    elif value is not None and not isinstance(value, str | int | float | bool):
        raise TypeError(
            f"{where}: a {type(value).__name__} has no stable form; use text, numbers, lists or dataclasses"
        )


def _leaves(value: Any, where: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in _leaves(item, f"{where}.{key}" if where else str(key))]
    return [(where, value)]


def _short(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
