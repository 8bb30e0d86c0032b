"""Where a chat template comes from, and what makes it render the same tomorrow. Apart from rendering: this is read once.

A template may ask for the date. Trained on, every row would hold the day on which it was tokenised, and no two runs would be
equal; so the date is written into the template, which then travels with the tokenizer.
"""

import datetime
import json
from pathlib import Path
from typing import Any

import jinja2.nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

from stages.contract import StageError
from stages.text.builtin_templates import TEMPLATES

FILE = "chat_template.jinja"
TOOL_FILE = "additional_chat_templates/tool_use.jinja"
DATE = datetime.date(2024, 7, 26)
"""What a template that asks for the date is told: the day that Llama's templates name themselves."""
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""What templates may write by name."""
RANDOM = ("random", "lipsum")


def find(directory: Path, override: str | None) -> str | None:
    """Text of the template: `override` (a file, or the name of a built-in one), else the tokenizer's own; None without any."""
    if override is not None:
        return _given(override)
    default, tool_use = _own(directory)
    if tool_use is None or tool_use == default or default is None:
        return default
    # Each behind an empty expression, so that white space at the borders of blocks stays as it is.
    first, second = tool_use.removesuffix("\n"), default.removesuffix("\n")
    return f"{{% if tools %}}{{{{ '' }}}}{first}{{{{ '' }}}}{{% else %}}{{{{ '' }}}}{second}{{{{ '' }}}}{{% endif %}}"


def required(directory: Path, override: str | None) -> str:
    """The same; StageError that names the two ways out."""
    text = find(directory, override)
    if text is None:
        raise StageError(
            f"the tokenizer has no chat template ({FILE} is missing, tokenizer_config.json has no chat_template), and the data "
            f"are chats; set stages.tokenize.chat_template or stages.pair.chat_template to a file or to one of "
            f"{', '.join(sorted(TEMPLATES))}, or bring prompt/completion data"
        )
    return text


def parsed(text: str, origin: str) -> jinja2.nodes.Template:
    """The template as transformers reads it. StageError: it is not one."""
    try:
        tree: jinja2.nodes.Template = _compile_jinja_template(text).environment.parse(text)
    except jinja2.TemplateSyntaxError as error:
        raise StageError(f"{origin}:{error.lineno}: the chat template does not compile ({error.message})") from error
    return tree


def settled(text: str, origin: str) -> str:
    """The template with the date written in. StageError: it draws lots, or asks for the date in a form not known before."""
    tree = parsed(text, origin)
    names = {node.name for node in tree.find_all(jinja2.nodes.Filter)}
    names |= {node.name for node in tree.find_all(jinja2.nodes.Name)}
    for name in RANDOM:
        if name in names:
            raise StageError(f"{origin}: the chat template uses {name!r}: equal chats would differ; take it out")
    if "strftime_now" not in names or any(macro.name == "strftime_now" for macro in tree.find_all(jinja2.nodes.Macro)):
        return text
    known: dict[str, str] = {}
    for call in tree.find_all(jinja2.nodes.Call):
        if not (isinstance(call.node, jinja2.nodes.Name) and call.node.name == "strftime_now"):
            continue
        asked = call.args[0] if len(call.args) == 1 else None
        if not (isinstance(asked, jinja2.nodes.Const) and isinstance(asked.value, str)):
            raise StageError(
                f"{origin}:{call.lineno}: the chat template asks for the date in a form that it makes up itself; write the "
                "date into the template"
            )
        known[asked.value] = DATE.strftime(asked.value)
    cases = "".join(
        f"{{%- if format == {json.dumps(asked)} -%}}{{{{ {json.dumps(told)} }}}}{{%- endif -%}}"
        for asked, told in sorted(known.items())
    )
    return f"{{%- macro strftime_now(format) -%}}{cases}{{%- endmacro -%}}{{{{ '' }}}}{text}"


def write(text: str, directory: Path) -> None:
    """Make it the one template of the tokenizer in `directory`, byte for byte."""
    (directory / FILE).write_bytes(text.encode())
    (directory / TOOL_FILE).unlink(missing_ok=True)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if config.pop("chat_template", None) is not None:
        path.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


def special_tokens(directory: Path) -> dict[str, str]:
    """By the name under which templates write them. An entry is a string, or an object with `content`."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / file).is_file():
            entries = json.loads((directory / file).read_text("utf-8"))
            named = {name: entries.get(name) for name in SPECIAL} | (entries.get("model_specific_special_tokens") or {})
            words = {name: word.get("content") if isinstance(word, dict) else word for name, word in named.items()}
            found |= {name: word for name, word in words.items() if isinstance(word, str)}
    return found


def _given(override: str) -> str:
    if override in TEMPLATES:
        return TEMPLATES[override]
    path = Path(override)
    if not path.is_file():
        raise StageError(
            f"chat_template={override}: there is no such file, and the built-in templates are "
            f"{', '.join(sorted(TEMPLATES))}"
        )
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise StageError(f"{override}: the chat template is not UTF-8 (byte {error.start})") from error


def _own(directory: Path) -> tuple[str | None, str | None]:
    """The default template and the one for chats with tools; a file goes before an entry in tokenizer_config.json."""
    entry: Any = None
    if (directory / "tokenizer_config.json").is_file():
        entry = json.loads((directory / "tokenizer_config.json").read_text("utf-8")).get("chat_template")
    if isinstance(entry, list):
        entry = {item["name"]: item["template"] for item in entry}
    named = entry if isinstance(entry, dict) else {"default": entry}
    for name, file in (("default", FILE), ("tool_use", TOOL_FILE)):
        if (directory / file).is_file():
            named[name] = (directory / file).read_bytes().decode()
    if named.get("default") is None and len(named) > 1 and named.get("tool_use") is None:
        raise StageError(
            f"the tokenizer has several chat templates and none is the default: {', '.join(sorted(named))}"
        )
    return named.get("default"), named.get("tool_use")
