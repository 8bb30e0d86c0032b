"""Chats as people's files hold them, into one form. Apart from the other formats, because most of what can be wrong with data
to learn from is wrong here.

A message keeps `role` and `content` (always a string: text parts are joined, null is empty), and where it has them
`tool_calls` (arguments decoded once), `tool_call_id`, `name` and `reasoning_content`. Nothing else is kept, and nothing that
matters is dropped without a word: what has no place here quarantines its row.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from stages.text import json_text
from stages.text.faults import Fault, kind, shown, word
from stages.text.record import canonical

Message = dict[str, Any]
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "chatbot": "assistant",
    "ai": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
TEXT_PARTS = ("text", "input_text", "output_text")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""What programs call the thoughts before an answer; the first is its name in a record."""
ATTACHED = ("image", "images", "video", "videos", "audio", "audios")
"""Fields with what a chat is about, beside its messages or in one."""
DEEPEST = 100
"""Levels of objects and lists in what a call passes, or in tools."""
OF_MESSAGES = ({"role", "content"}, {"role", "tool_calls"}, {"role", "function_call"}, {"from", "value"})
_BEGUN = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""")


class Texts:
    """Takes strings out of rows as they are, or, if asked to, repairs what no tokenizer can read and notes that it did."""

    def __init__(self, *, replace: bool) -> None:
        self.replace = replace
        self.repaired = False

    def take(self, value: Any, field: str) -> str:
        if isinstance(value, bytes):
            try:
                value = value.decode("utf-8", "replace" if self.replace else "strict")
            except UnicodeDecodeError as error:
                raise Fault("invalid_utf8", field, f"byte {error.start + 1}") from None
        if not isinstance(value, str):
            raise Fault("not_text", field, kind(value))
        if "\0" in value:
            value = self._repair(value.replace("\0", "\ufffd"), "nul_character", field)
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                whole = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
                return self._repair(whole, "lone_surrogate", field)
        return value

    def json(self, value: Any, field: str) -> str:
        """Canonical JSON of a part that is no plain text."""
        _require_shallow(value, field)
        try:
            written = canonical(value)
            if "\\u0000" in written:  # it is escaped there, as a backslash and "u0000" are
                written = canonical(self._strings(value, field))
            return self.take(written, field)
        except ValueError:  # NaN, Infinity
            raise Fault("not_text", field, "a number that JSON has not") from None
        except TypeError:  # Parquet has dates, decimals and bytes
            raise Fault("not_text", field, "a date, bytes or another kind that JSON has not") from None

    def _strings(self, value: Any, field: str) -> Any:
        if isinstance(value, dict):
            return {self.take(key, field): self._strings(inner, field) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._strings(inner, field) for inner in value]
        return self.take(value, field) if isinstance(value, str) else value

    def _repair(self, repaired: str, rule: str, field: str) -> str:
        if not self.replace:
            raise Fault(rule, field)
        self.repaired = True
        return repaired


def _require_shallow(value: Any, field: str) -> None:
    """What reads a record walks down its parts, some of it in two steps of Python's stack a level."""
    layer, level = [value], 0
    while layer := [
        inner
        for part in layer
        if isinstance(part, dict | list)
        for inner in (part.values() if isinstance(part, dict) else part)
    ]:
        level += 1
        if level > DEEPEST:
            raise Fault("nested_too_deeply", field, f"more than {DEEPEST} levels")


def decoded(value: Any, field: str) -> Any:
    """Lists of messages often travel as a string of JSON (in CSV they must)."""
    return json_text.value_of(value, field) if _looks_listed(value) else value


def glance(value: Any) -> Any:
    """The same for a look at what it may be, whatever its keys are; None where it is broken."""
    return json_text.glance(value) if _looks_listed(value) else value


def _looks_listed(value: Any) -> bool:
    return isinstance(value, str | bytes) and value.lstrip()[:1] in ("[", b"[")


def hold_messages(value: Any) -> bool:
    """Whether this is messages, as they are or as a string of JSON (be it broken), and no text that begins with a bracket."""
    if not isinstance(value, str | bytes):
        return isinstance(value, list | dict)
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    found = glance(text)
    if found is None:
        return _BEGUN.match(text) is not None
    return isinstance(found, list) and any(
        isinstance(message, dict) and any(keys <= message.keys() for keys in OF_MESSAGES) for message in found
    )


def refuse_attached(row: Mapping[str, Any], at: str = "", names: tuple[str, ...] = ATTACHED) -> None:
    """What is said is about what stands in these fields, and cannot be learned without it."""
    for name in names:
        if (given := without_null(row.get(name))) and given != "[]":
            raise Fault("attachment", f"{at}{name}", kind(row[name]))


def role_of(name: Any) -> str | None:
    """The one name of a role that goes by many, in capitals too."""
    return ROLES.get(name.lower()) if isinstance(name, str) else None


def messages(value: Any, field: str, texts: Texts) -> list[Message]:
    """A list of messages with role/content or from/value, each in the one form; their order is not looked at."""
    value = listed(decoded(value, field))
    if not isinstance(value, list):
        raise Fault("not_a_list", field, kind(value))
    return [_message(message, f"{field}[{index}]", texts) for index, message in enumerate(value)]


def listed(value: Any) -> Any:
    """One message is a list of one; a list of messages may be written by its columns, as older data sets of a hub have it."""
    if not isinstance(value, dict):
        return value
    columns = [column for column in value.values() if isinstance(column, list)]
    if not columns or len(columns) < len(value) or len({len(column) for column in columns}) > 1:
        return [value]
    return [dict(zip(value, items, strict=True)) for items in zip(*columns, strict=True)]


def _message(message: Any, at: str, texts: Texts) -> Message:
    if not isinstance(message, dict):
        raise Fault("not_a_message", at, kind(message))
    named, said = ("role", "content") if message.get("role") is not None else ("from", "value")
    if message.get(named) is None:
        raise Fault("not_a_message", at, "no role")
    role = role_of(message[named])
    if role is None:
        raise Fault("unknown_role", at, word(message[named]))
    if message.get("weight") not in (None, 1) or message.get("train") is False:
        raise Fault("unsupported_weight", at)
    refuse_attached(message, f"{at}.", (*ATTACHED, "attachments", "files"))
    calls = _calls(message, at, texts)
    if message[named].lower() == "function_call":  # what is said is the call
        if calls:
            raise Fault("two_values", f"{at}.{said}", "the call stands beside it too")
        kept: Message = {"role": role, "content": ""}
        calls = [_call(decoded_object(message.get(said), f"{at}.{said}"), f"{at}.{said}", texts)]
    else:
        kept = {"role": role, "content": _content(message.get(said), f"{at}.{said}", texts)}
    if calls:
        kept["tool_calls"] = calls
    if message.get(said) is None and not (calls and role == "assistant"):
        there = "" if said in message else f"found {shown(message)}"
        raise Fault("null_content", f"{at}.{said}", there)
    for key in ("tool_call_id", "name"):
        if message.get(key) is not None:
            kept[key] = texts.take(message[key], f"{at}.{key}")
    return kept | _thought(message, at, texts)


def _thought(message: Message, at: str, texts: Texts) -> Message:
    """Under one name; where it stands under two, an empty one says nothing."""
    thoughts = {key: texts.take(message[key], f"{at}.{key}") for key in REASONING if message.get(key) is not None}
    said = {thought: key for key, thought in thoughts.items() if thought}
    if len(said) > 1:
        first, other, *_ = said.values()
        raise Fault("two_values", f"{at}.{other}", f"{first} has another")
    return {REASONING[0]: next(iter(said), "")} if thoughts else {}


def _content(value: Any, at: str, texts: Texts) -> str:
    if value is None:
        return ""
    if not isinstance(value, list):
        return texts.take(value, at)
    said = []
    for index, part in enumerate(value):
        if isinstance(part, str):
            said.append(texts.take(part, f"{at}[{index}]"))
        elif isinstance(part, dict) and (part.get("type") in TEXT_PARTS or set(without_null(part)) == {"text"}):
            refuse_attached(part, f"{at}[{index}].", (*ATTACHED, "image_url", "input_audio", "file"))
            said.append(texts.take(part.get("text"), f"{at}[{index}].text"))
        else:
            raise Fault(
                "unsupported_content_part", f"{at}[{index}]", word(part.get("type") if isinstance(part, dict) else part)
            )
    return "".join(said)


def decoded_object(value: Any, field: str) -> Any:
    """Objects travel as a string of JSON too; None where it is broken."""
    if not isinstance(value, str):
        return value
    try:
        return json_text.value_of(value, field)
    except Fault as fault:
        if fault.rule == "broken_json":
            return None
        raise


def _calls(message: Message, at: str, texts: Texts) -> list[Message]:
    """Of `tool_calls`, or of the older `function_call`; some programs write the same one under both."""
    given = decoded(message.get("tool_calls") or [], f"{at}.tool_calls")
    if not isinstance(given, list):
        raise Fault("broken_tool_call", f"{at}.tool_calls", kind(given))
    calls = [_call(call, f"{at}.tool_calls[{n}]", texts) for n, call in enumerate(given)]
    older = without_null(message.get("function_call"))
    if not older:
        return calls
    call = _call(decoded_object(older, f"{at}.function_call"), f"{at}.function_call", texts)
    if calls and canonical([known["function"] for known in calls]) != canonical([call["function"]]):
        raise Fault("two_values", f"{at}.function_call", "tool_calls has others")
    return calls or [call]


def _call(call: Any, at: str, texts: Texts) -> Message:
    """{"type": "function", "function": {"name", "arguments": object}[, "id"]}."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Fault("broken_tool_call", at, "no function name")
    given = function.get("arguments")
    if given is None or given == "":  # as many programs write that there are none
        given = {}
    at_arguments = f"{at}.arguments"
    arguments = decoded_object(given, at_arguments) if isinstance(given, str) else without_null(given)
    if not isinstance(arguments, dict):
        raise Fault("broken_tool_call", at_arguments, "not JSON" if arguments is None else "not a JSON object")
    arguments = json.loads(texts.json(arguments, at_arguments))
    made: Message = {"type": "function", "function": {"name": texts.take(function["name"], at), "arguments": arguments}}
    if call.get("id") is not None:
        made["id"] = texts.take(call["id"], f"{at}.id")
    return made


def without_null(value: Any) -> Any:
    """Without the keys that are null: Arrow gives every object of a column the keys of all others."""
    if isinstance(value, dict):
        return {key: without_null(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_null(inner) for inner in value]
    return value


def tools(value: Any, field: str, texts: Texts) -> str:
    """Canonical JSON of a list of function schemas; empty when there are none."""
    if not value:
        return ""
    listed = without_null(decoded(value, field))
    if not isinstance(listed, list):
        raise Fault("broken_tools", field, kind(listed))
    made = []
    for index, tool in enumerate(listed):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Fault("broken_tools", f"{field}[{index}]", "no function name")
        made.append(tool if "function" in tool else {"type": "function", "function": tool})
    return texts.json(made, field) if made else ""
