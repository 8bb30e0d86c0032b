"""Overrides of groups that are not there yet: those that may be null, as in `stages.clean.near_duplicates.remove=false`, and those
that a person names, as in `stages.ingest.mix.mine.path=my.jsonl`. Apart from composing, because it mends what OmegaConf 2.3 gets
wrong: below a null group an override fails on an assertion, `={}` leaves it null without a word, and a new name is "not in struct".
"""

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

from pipelines.mistakes import ConfigError, did_you_mean
from stages.contract import STAGES


def split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """(overrides for Hydra, those that reach into a stage's group that may be null)."""
    inside = [override for override in overrides if _reaches_in(override)]
    return [override for override in overrides if override not in inside], inside


def apply(node: Any, overrides: Sequence[str]) -> None:
    """Set each on the composed node; groups on its way that are null become what their dataclass says."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, value = override.key_or_group, override.value()
        names = key.split(".")
        for length in range(1, len(names) + isinstance(value, dict)):
            _make(node, names[: length - 1], names[length - 1], key)
        if isinstance(value, str) and names[-2] == "mix":
            raise ConfigError(f"{key} is a group; write {key}.path={value}, or {key}={{...}} with its fields")
        OmegaConf.update(node, key, value, merge=True, force_add=True)
        if (
            names[2] == "mix"
        ):  # rows come from its sources: an option's own `source.path: ???` asks for nothing any more
            source = OmegaConf.select(node, f"stages.{names[1]}.source")
            if OmegaConf.is_missing(source, "path"):
                source.path = None


def _make(node: Any, way: list[str], name: str, key: str) -> None:
    from omegaconf import OmegaConf, open_dict

    above = OmegaConf.select(node, ".".join(way)) if way else node
    if OmegaConf.select(above, name) is not None:
        return
    kind = OmegaConf.get_type(above)
    group = _field(kind, name)[0] if dataclasses.is_dataclass(kind) else None
    if group is None and len(way) > 2:  # a name in a map of groups, as those of a mix
        group = above._metadata.element_type
    if not dataclasses.is_dataclass(group):
        known = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(above)
        what = "is no group" if name in known else "is not there"
        raise ConfigError(f"{key}: {'.'.join([*way, name])} {what}{did_you_mean(name, known)}")
    with open_dict(above):
        above[name] = OmegaConf.structured(group)


def _reaches_in(override: str) -> bool:
    """Whether its key names a field inside such a group, or the group itself with a `{...}`, in any kind of stage."""
    key, equals, value = override.lstrip("+").partition("=")
    names = key.split(".")
    if not equals or names[0] != "stages" or len(names) < 3:
        return False
    return any(_passes(config, names[2:], value) for config in STAGES)


def _passes(config: type, names: list[str], value: str) -> bool:
    kind, optional = _field(config, names[0])
    if kind is None:
        return False
    if typing.get_origin(typing.get_type_hints(config)[names[0]]) is dict:
        return True
    if optional:
        return len(names) > 1 or value.startswith("{")
    return len(names) > 1 and _passes(kind, names[1:], value)


def _field(config: Any, name: str) -> tuple[type | None, bool]:
    """(dataclass of a field or None, whether it may be null)."""
    hint = typing.get_type_hints(config).get(name)
    kinds = typing.get_args(hint) or (hint,)
    kind = next((each for each in kinds if dataclasses.is_dataclass(each)), None)
    return typing.cast("type | None", kind), type(None) in kinds
