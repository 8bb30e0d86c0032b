"""The identity of a stage's result: everything that can change it, and nothing else. Apart, because all reuse rests on it.

`payload` gathers the facets (config, seed, inputs' content, sources, code, library versions); `digest` hashes its canonical
JSON; `difference` says in words how two payloads differ. Store root, host, device, run id and `resources` never enter.
"""

import ast
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.config import COMPOSED, WAIVABLE, plain
from pipelines.kept import Kept
from stages.contract import Stage, StageConfig

SCHEMA = 1
"""Version of the payload's form; raising it re-runs everything."""

FACETS = ("config", "seed", "inputs", "sources", "code", "env", "schema")
"""What a payload holds besides the stage's name, in the order in which a person wants to read of changes."""

_parsed = Kept(COMPOSED / "code.json")

OURS = "stages"
"""The package whose modules are part of every stage that imports them; a private stage adds its own top-level package."""


def payload(
    stage: Stage, cfg: StageConfig, seed: int, inputs: Mapping[str, str], sources: Mapping[str, str]
) -> dict[str, Any]:
    """All facets of a stage's identity. `inputs`: parameter -> content digest of the artifact handed in."""
    config = identity(cfg)
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


def identity(value: Any) -> Any:
    """A config as plain values, without the fields that only say where something is (`contract.location`)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = [f.name for f in dataclasses.fields(value) if f.metadata.get("identity", True)]
        return {name: identity(getattr(value, name)) for name in kept}
    if isinstance(value, list | tuple):
        return [identity(item) for item in value]
    if isinstance(value, dict):
        return {_name(key): identity(item) for key, item in value.items()}
    return plain(value)


def _name(key: Any) -> Any:
    """A key of JSON. Whole numbers are written in digits: `{5: 0.15}` is as stable as `{"5": 0.15}`."""
    return str(key) if type(key) is int else key if isinstance(key, str) else plain(key)


def digest(facets: Mapping[str, Any]) -> str:
    """sha256 of the canonical JSON, 64 hex characters."""
    return hashlib.sha256(canonical(facets).encode()).hexdigest()


def canonical(value: Any) -> str:
    """JSON with sorted keys and no white space. TypeError for what has no stable form (sets, paths, callables, NaN)."""
    _require_stable(value, "payload")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def without(facets: Mapping[str, Any], waived: tuple[str, ...]) -> str:
    """Canonical JSON of a payload with some facets left out: equal for payloads that differ in those alone."""
    return canonical({key: value for key, value in facets.items() if key not in waived})


def recipe(facets: Mapping[str, Any]) -> str:
    """Digest of what was asked for: the payload without the facets that `run.accept` may waive."""
    return hashlib.sha256(without(facets, WAIVABLE).encode()).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[str]]:
    """Facet -> its changes, field by field, in words. Facets without a change are absent; empty exactly when digests agree."""
    found: dict[str, list[str]] = {}
    before, after = dict(_leaves(old, ())), dict(_leaves(new, ()))
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if was is _ABSENT or now is _ABSENT or canonical(was) != canonical(now):
            found.setdefault(key[0], []).append(_change(key[0], ".".join(key[1:]), was, now))
    return {facet: found[facet] for facet in (*FACETS, *sorted(found.keys() - {*FACETS})) if facet in found}


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The same as one list: `config.learning_rate 0.0002 -> 0.0001`, `code stages/training/loop.py changed`."""
    return [change for changes in differences(old, new).values() for change in changes]


_ABSENT = object()


def _change(facet: str, rest: str, was: Any, now: Any) -> str:
    if facet == "code":
        return f"code {rest} {'added' if was is _ABSENT else 'removed' if now is _ABSENT else 'changed'}"
    show = (lambda value: str(value)[:12]) if facet in ("inputs", "sources") else _short
    shown = ["absent" if value is _ABSENT else show(value) for value in (was, now)]
    return f"{facet}{'.' if rest else ''}{rest} {shown[0]} -> {shown[1]}"


# Code


@functools.cache
def code_digests(module: str) -> dict[str, str]:
    """`code_now`, once a process: what this process and its workers load is what was there at first."""
    return code_now(module)


def code_now(module: str) -> dict[str, str]:
    """File -> digest of its normalised AST, for a module and the first-party modules it imports, directly or not.

    First-party is `stages`, and the top-level package of the module itself where that is another one: a company's private
    stages. Other libraries enter by the version that a stage declares. ValueError for a module without a source file.
    """
    packages = (OURS, module.partition(".")[0])
    found: dict[str, str] = {}
    # What runs as __main__ has a file, but no name under which a worker process would find it again.
    waiting, seen = ([] if module == "__main__" else [module]), set()
    while waiting:
        name = waiting.pop()
        if name in seen or name.partition(".")[0] not in packages:
            continue
        seen.add(name)
        path, label = _source(name)
        if path is None:
            continue
        status = path.stat()
        digest_of_file, imported = _read_module(name, path, status.st_mtime_ns, status.st_size)
        waiting += imported
        found[label] = digest_of_file
    if not found:
        raise ValueError(
            f"{module}: has no source file, so nobody could tell when its code changes; put it in a package"
        )
    _parsed.save()
    return dict(sorted(found.items()))


@functools.cache
def _read_module(name: str, path: Path, mtime_ns: int, size: int) -> tuple[str, tuple[str, ...]]:
    """(digest of its normalised AST, names it may import); kept for as long as the file is the same."""
    text = path.read_bytes()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    # Parsing all of a pipeline's code costs 0.15 s of CPU: what equal bytes came to under this Python and this file is kept.
    known = f"{sys.version}\0{_how()}\0{package}\0".encode()
    key = hashlib.sha256(known + text).hexdigest()
    if (kept := _parsed.get(key)) is not None:
        return str(kept[0]), tuple(kept[1])
    tree = ast.parse(text)
    made = hashlib.sha256(normalised(tree).encode()).hexdigest()[:16], tuple(_imports(tree, package))
    _parsed.put(key, [made[0], list(made[1])])
    return made


@functools.cache
def _how() -> str:
    """This file's own digest: it decides what a text comes to."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def normalised(tree: ast.AST) -> str:
    """The tree's dump without positions and docstrings (comments are not in it): what the code means, not how it looks."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [n for n in body if not _is_docstring(n)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.dump(tree, annotate_fields=False, include_attributes=False)


@functools.cache
def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"the stage names the library {distribution}, which is not installed here") from None


def versions(distributions: tuple[str, ...]) -> dict[str, str]:
    """Distribution -> installed version."""
    return {name: _version(name) for name in distributions}


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _imports(tree: ast.AST, package: str) -> list[str]:
    """Full names that a module of `package` may import, and the packages around each: their `__init__` runs too."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            around = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*around, *([node.module] if node.module else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return sorted({".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 2)})


def _source(module: str) -> tuple[Path | None, str]:
    """(the file of a first-party module, its name relative to where the package lies); None for names that are no module."""
    # How stages are found, declared and handed on is not what they compute.
    if module in (OURS, *(f"{OURS}.{name}" for name in ("contract", "artifacts", "storage", "storage.bucket"))):
        return None, ""
    top, *rest = module.split(".")
    for place in _places(top):
        base = place.joinpath(top, *rest)
        for path in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
            if path.is_file():
                return path, path.relative_to(place).as_posix()
    return None, ""


@functools.cache
def _places(top: str) -> tuple[Path, ...]:
    """Directories that hold a top-level package or module. Looks, but imports nothing."""
    try:
        spec = importlib.util.find_spec(top)
    except (ValueError, ImportError):  # __main__, or nothing of that name
        spec = None
    if spec is None:
        return ()
    if spec.submodule_search_locations:
        return tuple(Path(place).resolve().parent for place in spec.submodule_search_locations)
    return (Path(spec.origin).resolve().parent,) if spec.origin and spec.origin.endswith(".py") else ()


def _require_stable(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: key {key!r} is not text and has no stable form")
            _require_stable(key, f"{where}: key {key!r}")
            _require_stable(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_stable(item, f"{where}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"{where}: {value} has no stable form")
    elif isinstance(value, str) and not _is_unicode(value):
        raise TypeError(f"{where}: half a character (a lone surrogate) has no stable form")
    elif value is not None and not isinstance(value, str | int | float | bool):
        raise TypeError(
            f"{where}: a {type(value).__name__} has no stable form; use text, numbers, lists or dataclasses"
        )


def _is_unicode(text: str) -> bool:
    """Two lone surrogates would be written like the character that they make together."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _leaves(value: Any, where: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping) and value:
        return [leaf for key, item in value.items() for leaf in _leaves(item, (*where, str(key)))]
    return [(where, value)]


def _short(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
