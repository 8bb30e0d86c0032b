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
        try:
            written = canonical(value)
            if "\\u0000" in written:  # it is escaped there, as a backslash and "u0000" are
                written = canonical(self._strings(value, field))
            return self.take(written, field)
        except (ValueError, RecursionError):  # NaN, Infinity
            raise Fault("not_text", field, "a number that JSON has not") from None

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


def decoded(value: Any, field: str) -> Any:
    """Lists of messages often travel as a string of JSON (in CSV they must)."""
    if isinstance(value, str | bytes) and value.lstrip()[:1] in ("[", b"["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise Fault("broken_json", field) from None
    return value


def hold_messages(value: Any) -> bool:
    """Whether this is messages, as they are or as a string of JSON (be it broken), and no text that begins with a bracket."""
    if not isinstance(value, str | bytes):
        return isinstance(value, list | dict)
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    try:
        found = decoded(text, "")
    except Fault:
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
    if message[named] == "function_call" and named == "from":
        return {
            "role": role,
            "content": "",
            "tool_calls": [_call(decoded_object(message.get(said)), f"{at}.{said}", texts)],
        }
    kept: Message = {"role": role, "content": _content(message.get(said), f"{at}.{said}", texts)}
    calls = message.get("tool_calls") or []
    if message.get("function_call"):
        calls = [message["function_call"]]
    if not isinstance(calls, list):
        raise Fault("broken_tool_call", f"{at}.tool_calls", kind(calls))
    if calls:
        kept["tool_calls"] = [_call(call, f"{at}.tool_calls[{n}]", texts) for n, call in enumerate(calls)]
    if message.get(said) is None and not (calls and role == "assistant"):
        there = "" if said in message else f"found {shown(message)}"
        raise Fault("null_content", f"{at}.{said}", there)
    for key in ("tool_call_id", "name"):
        if message.get(key) is not None:
            kept[key] = texts.take(message[key], f"{at}.{key}")
    thought = next((key for key in REASONING if message.get(key) is not None), None)
    if thought is not None:
        kept[REASONING[0]] = texts.take(message[thought], f"{at}.{thought}")
    return kept


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
            said.append(texts.take(part.get("text"), f"{at}[{index}].text"))
        else:
            raise Fault(
                "unsupported_content_part", f"{at}[{index}]", word(part.get("type") if isinstance(part, dict) else part)
            )
    return "".join(said)


def decoded_object(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value


def _call(call: Any, at: str, texts: Texts) -> Message:
    """{"type": "function", "function": {"name", "arguments": object}[, "id"]}."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Fault("broken_tool_call", at, "no function name")
    given = function.get("arguments")
    if given is None or given == "":  # as many programs write that there are none
        given = {}
    arguments = without_null(given) if not isinstance(given, str) else decoded_object(given)
    if not isinstance(arguments, dict):
        raise Fault("broken_tool_call", f"{at}.arguments", "not JSON" if arguments is None else "not a JSON object")
    arguments = json.loads(texts.json(arguments, f"{at}.arguments"))
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
    if value is None or value == "" or value == []:
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


def require_order(chat: list[Message], field: str, before: int = 0) -> None:
    """One system message at most, and first; a tool answers a call that was made; each call is answered before others speak
    (an answer that names no call may be to all of them). So many messages `before` do not stand in the field itself."""
    if not chat:
        raise Fault("empty_conversation", field)
    called: set[str] = set()
    waiting: set[str | None] = set()
    before_tool = False
    for index, message in enumerate(chat):
        at, role = f"{field}[{index - before}]" if index >= before else "prompt", message["role"]
        if role == "system" and index:
            raise Fault("role_order", at, "system behind the first message")
        if role == "tool":
            if not before_tool:
                raise Fault("role_order", at, "tool without a call before it")
            if "tool_call_id" in message and called and message["tool_call_id"] not in called:
                raise Fault("orphan_tool_call_id", at)
            waiting -= {message["tool_call_id"], None} if "tool_call_id" in message and called else waiting
            continue
        if waiting:
            raise Fault("unanswered_tool_call", at)
        waiting = {call.get("id") for call in message.get("tool_calls", [])}
        called |= {name for name in waiting if name is not None}
        before_tool = bool(waiting)


def require_assistant(chat: list[Message], field: str, before: int = 0) -> None:
    """Somebody answers, and no answer is empty: a model would learn to end its turn at once."""
    if not any(m["role"] == "assistant" and (m["content"].strip() or m.get("tool_calls")) for m in chat):
        raise Fault("no_assistant_turn", field)
    for index, message in enumerate(chat):
        said = message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")
        if message["role"] == "assistant" and not said:
            raise Fault("empty_answer", f"{field}[{index - before}]")
