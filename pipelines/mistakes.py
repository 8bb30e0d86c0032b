"""A user's mistake in a config, in one message: field, what was found, what was wanted, the form that works. Apart, because
Hydra and OmegaConf have a dozen ways to say it and let some mistakes pass (`+key=`, the word None).
"""

import dataclasses
import difflib
import re
import typing
from pathlib import Path
from typing import Any

CONF = Path(__file__).parents[1] / "conf"
FORMS = {
    "Float": "; write a number such as 0.001 or 1e-3",
    "Integer": "; write a whole number such as 8",
    "bool": "; write true or false",
}
"""How a value is written, by OmegaConf's word for its kind."""
PLACES = (
    "where a pipeline begins with a model, model= takes a folder, a .gguf file, a registered model (models:/name@alias) or a hub's "
    "(owner/name)"
)


class ConfigError(ValueError):
    """The user's configuration is wrong: exit code 1, one message, nothing was started."""


def did_you_mean(word: str, known: list[str]) -> str:
    """ "; did you mean 'x'?" or the list of what there is."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; there are: {', '.join(sorted(known))}"


def reject_unknown_keys(node: Any, where: str) -> None:
    """Hydra accepts `+key=` even under a dataclass; a key that no field reads is a mistake."""
    from omegaconf import DictConfig, OmegaConf

    if not isinstance(node, DictConfig) or node._is_none() or node._is_missing() or node._is_interpolation():
        return
    kind = OmegaConf.get_type(node)
    if dataclasses.is_dataclass(kind):
        known = [f.name for f in dataclasses.fields(kind)]
        for key in node:
            if key not in known:
                raise ConfigError(
                    f"{_join(where, str(key))} is not a field of {kind.__name__}{did_you_mean(str(key), known)}"
                )
    elif where.startswith("stages.") and where.count(".") == 1:
        raise ConfigError(
            f"{where} has no schema: pick an option of a stage, for example `- /train: pretrain` in the pipeline's defaults"
        )
    for key in node:
        if not OmegaConf.is_missing(node, key):
            reject_unknown_keys(node._get_node(key), _join(where, str(key)))


def refuse_the_word_none(value: Any, where: str) -> None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = typing.get_type_hints(type(value))
        for f in dataclasses.fields(value):
            item = getattr(value, f.name)
            if isinstance(item, str) and item in ("None", "none") and type(None) in typing.get_args(hints[f.name]):
                raise ConfigError(
                    f"{_join(where, f.name)}={item} is the text {item!r}: to switch it off write {_join(where, f.name)}=null"
                )
            refuse_the_word_none(item, _join(where, f.name))
    elif isinstance(value, dict):
        for key, item in value.items():
            refuse_the_word_none(item, _join(where, str(key)))


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def explain(error: Exception, overrides: list[str]) -> str:
    """One message from Hydra's and OmegaConf's: field, what was found, what was wanted, the form that works."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError, ValidationError

    cause: BaseException = error
    while cause.__cause__ is not None and not isinstance(cause, OverrideParseException | MissingConfigException):
        cause = cause.__cause__
    if isinstance(cause, OverrideParseException):
        key, equals, value = cause.override.partition("=")
        quoted = f"{key}='{value}'" if equals else cause.override
        return (
            f"cannot read the override {cause.override!r}: characters such as = ? & * or accents need quotes inside quotes: "
            f'make run "{quoted}"'
        )
    first = str(cause).strip().split("\n")[0]
    full_key = str(getattr(cause, "full_key", "") or "")
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        parent = getattr(cause, "object_type", None)
        key = str(getattr(cause, "key", full_key))
        known = [f.name for f in dataclasses.fields(parent)] if dataclasses.is_dataclass(parent) else []
        if known:
            return (
                f"{full_key or key} is not a field of {getattr(parent, '__name__', parent)}{did_you_mean(key, known)}"
            )
        return first
    if isinstance(cause, ValidationError):
        wanted = re.search(r"(?:could not be converted to|is not a valid) (\w+)", first)
        first += FORMS.get(wanted.group(1), "") if wanted else ""
        return f"{full_key}: {first}" if full_key and full_key not in first else first
    if isinstance(cause, InterpolationResolutionError):
        return f"{full_key}: {first}"
    if isinstance(cause, MissingConfigException):
        return _missing_option(cause)
    text = " ".join(str(error).split())
    if missing := re.match(r"Could not override '([\w/]+)'", text):
        return _no_such_choice(missing.group(1), overrides)
    return text


def _no_such_choice(group: str, overrides: list[str]) -> str:
    """The pipeline takes no option of this group: most often a stage that it does not have, or a model that is no place."""
    having = sorted(
        file.stem for file in (CONF / "pipeline").glob("*.yaml") if f"- /{group}:" in file.read_text("utf-8")
    )
    named = next((word.partition("=")[2] for word in overrides if word.startswith("model=")), "")
    place = f", and {named!r} is no folder; {PLACES}" if group == "model" else ""
    return f"the pipeline has no {group} to choose an option for{place}" + (
        f"; pipelines that have it: {', '.join(having)} (pipeline={having[0]})"
        if having
        else f": no pipeline has {group}"
    )


def _missing_option(error: Any) -> str:
    wanted = str(error.missing_cfg_file or "")
    group, _, option = wanted.rpartition("/")
    options = [name for name in (error.options or []) if name != "schema"]
    if group and options:
        place = f"; {PLACES}" if group == "model" else ""
        return f"{group}={option}: there is no such option{did_you_mean(option, options)}{place}"
    return " ".join(str(error).split())
