"""Writes docs/reference.md: every field of every config class, with its type, default and docstring. `make reference`."""

import ast
import dataclasses
import enum
import inspect
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

import stages
from pipelines import config
from stages.contract import STAGES

HEAD = """# Configuration reference

Written by `make reference` from the dataclasses; do not edit. A field is overridden by its full name, for example
`make run stages.train.learning_rate=3e-4`. What stands under `resources` changes how a stage is computed, never its result,
and does not enter its fingerprint.
"""


def field_docs(cls: type) -> dict[str, str]:
    """Field -> the docstring that follows it, base classes included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for item, after in zip(body.body, [*body.body[1:], None], strict=True):
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                docs[ast.unparse(item.target)] = " ".join(str(after.value.value).split())
    return docs


def rows(cls: type, prefix: str) -> list[str]:
    """One table row a field, nested classes after their parent."""
    lines = []
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    for field in dataclasses.fields(cls):
        if field.name in ("inputs", "stages"):
            continue
        kind = hints[field.name]
        by_name = typing.get_origin(kind) is dict  # each with the fields of a class that has its rows already
        nested = next((a for a in (*typing.get_args(kind), kind) if dataclasses.is_dataclass(a) and not by_name), None)
        default = "" if nested else f"`{_default(field)}`"
        lines.append(
            f"| `{prefix}.{field.name}` | {_kind(kind)} | {default} | {docs.get(field.name, '').replace('|', chr(92) + '|')} |"
        )
        if nested:
            lines += rows(typing.cast(type, nested), f"{prefix}.{field.name}")
    return lines


def text() -> str:
    """The whole page."""
    stages.import_verbs()
    head = "\n| field | type | default | meaning |\n| --- | --- | --- | --- |\n"
    ours = {s.name: cls for cls, s in STAGES.items() if cls.__module__.startswith("stages.")}
    parts = [HEAD]
    for name in sorted(ours):
        about = (inspect.getdoc(inspect.getmodule(ours[name])) or "").split("\n\n")[0].replace("\n", " ")
        parts.append(f"\n## {name}\n\n{about}\n{head}" + "\n".join(rows(ours[name], f"stages.{name}")) + "\n")
    for section, cls in (
        ("run", config.RunConfig),
        ("cluster", config.ClusterConfig),
        ("tracking", config.TrackingConfig),
        ("store", config.StoreConfig),
        ("sweep", config.SweepConfig),
    ):
        parts.append(f"\n## {section}\n\n{inspect.getdoc(cls)}\n{head}" + "\n".join(rows(cls, section)) + "\n")
    return "".join(parts)


def _kind(kind: Any) -> str:
    if isinstance(kind, types.UnionType):
        return " or ".join("null" if a is type(None) else _kind(a) for a in typing.get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ", ".join(kind.__members__)
    if typing.get_origin(kind) is list and issubclass(item := typing.get_args(kind)[0], enum.Enum):
        return f"list of {_kind(item)}"
    return getattr(kind, "__name__", str(kind)) if not typing.get_args(kind) else str(kind).replace("typing.", "")


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        value = field.default
    else:
        return "required"
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list) and any(isinstance(item, enum.Enum) for item in value):
        return f"[{', '.join(item.name for item in value)}]"
    return "null" if value is None else str(value)


if __name__ == "__main__":
    (Path(__file__).parent / "reference.md").write_text(text(), "utf-8")
