"""What a row of a file means: which of the known formats it is in, and the canonical record it becomes. Apart from containers: a
chat is a chat in JSON Lines, CSV or Parquet.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from stages.text import exports, preferences
from stages.text.chats import (
    ATTACHED,
    Message,
    Texts,
    decoded,
    hold_messages,
    listed,
    messages,
    refuse_attached,
    require_assistant,
    require_order,
    tools,
)  # fmt: skip
from stages.text.faults import Fault
from stages.text.record import CHAT, PREFERENCE, PROMPT_COMPLETION, TEXT, canonical

Row = Mapping[str, Any]
Parts = dict[str, str]


class Format(Enum):
    """How a row says what it has to say."""

    auto = "auto"
    chat = "chat"
    sharegpt = "sharegpt"
    alpaca = "alpaca"
    prompt_completion = "prompt_completion"
    text = "text"
    preference = "preference"


class EncodingErrors(Enum):
    """What happens to a row with a text that no tokenizer can read."""

    quarantine = "quarantine"
    replace = "replace"


@dataclass(frozen=True)
class Fields:
    """What the fields are called in a source."""

    text: str = "text"
    prompt: str = "prompt"
    completion: str = "completion"
    messages: str | None = None
    chosen: str = "chosen"
    rejected: str = "rejected"
    prompt_repeated: bool | None = None
    """Of preferences in strings: the prompt is taken off answers that both begin with it. None: not settled yet."""

    def of_messages(self, row: Row) -> str:
        """The field that holds the conversation."""
        if self.messages is not None:
            return self.messages
        return next(
            (name for name in ("messages", "conversations", "conversation") if row.get(name) is not None), "messages"
        )

    def of_completion(self, row: Row) -> str:
        """`response` is as common as `completion`."""
        return "response" if self.completion == "completion" and "completion" not in row else self.completion

    def all(self) -> frozenset[str]:
        """Every field that a format may look at: no other column is read."""
        named = {self.text, self.prompt, self.completion, self.chosen, self.rejected, self.messages or "messages"}
        return frozenset(named) | KNOWN_FIELDS


NOTHING: tuple[Any, ...] = (None, "", [], {}, "[]")
"""What stands in a field that a row does not use; the last in tables, whose values are texts."""
_OTHERS = (
    "context question conversations conversation response system tools functions instruction input output history mapping"
    " chat_messages label current_node preferred_output non_preferred_output"
)
KNOWN_FIELDS = frozenset(ATTACHED) | frozenset(_OTHERS.split())


def recognise(row: Row, fields: Fields) -> tuple[Format, str] | None:
    """(format, why) by the names of the fields and what stands in them; the most particular first."""
    if fields.chosen in row and fields.rejected in row:
        return Format.preference, f"fields {fields.chosen} and {fields.rejected}"
    if "preferred_output" in row and "non_preferred_output" in row:
        return Format.preference, "fields preferred_output and non_preferred_output"
    if "mapping" in row and "current_node" in row:
        return Format.chat, "a tree `mapping` of messages, as ChatGPT exports it"
    if "chat_messages" in row:
        return Format.chat, "a list `chat_messages`, as Claude exports it"
    name = fields.of_messages(row)
    if row.get(name) is not None and (style := _style(row[name], name)) is not None:
        keys = "role and content" if style is Format.chat else "from and value"
        return style, f"field {name} is a list of messages with {keys}"
    if "instruction" in row and (answer := _answer(row)) in row:
        return Format.alpaca, f"fields instruction and {answer}"
    completion = fields.of_completion(row)
    if _conversational(row, fields):
        return Format.chat, f"field {fields.prompt} is a list of messages, which {completion} goes on with"
    if fields.prompt in row and completion in row:
        return Format.prompt_completion, f"fields {fields.prompt} and {completion}"
    if fields.text in row:
        return Format.text, f"field {fields.text}"
    return None


def _answer(row: Row) -> str:
    """Dolly has `response` and `context` where Alpaca has `output` and `input`."""
    return "output" if "output" in row or "response" not in row else "response"


def _conversational(row: Row, fields: Fields) -> bool:
    """A prompt of messages, and what completes it: messages or a text."""
    return hold_messages(row.get(fields.prompt)) and row.get(fields.of_completion(row)) is not None


def repeats_prompt(row: Row, fields: Fields) -> bool:
    """Whether both answers of a preference in strings begin with its prompt."""
    prompt, *answers = (row.get(name) for name in (fields.prompt, fields.chosen, fields.rejected))
    return (
        isinstance(prompt, str) and prompt != "" and all(isinstance(a, str) and a.startswith(prompt) for a in answers)
    )


def _style(value: Any, field: str) -> Format | None:
    try:
        value = listed(decoded(value, field))
    except Fault:
        return None
    first = value[0] if isinstance(value, list) and value else None
    if not isinstance(first, dict):
        return Format.chat if value == [] else None
    return Format.sharegpt if first.get("from") is not None else Format.chat if "role" in first else None


def by_names(names: Iterable[str], fields: Fields) -> str:
    """The format that a header's names would make, or an empty string."""
    row = dict.fromkeys(names, "")
    if (fields.messages or "messages") in row or "conversations" in row:
        return Format.chat.value
    found = recognise(row, fields)
    return found[0].value if found else ""


@dataclass(frozen=True)
class Decision:
    """The one format of a source."""

    format: Format
    why: str

    @classmethod
    def of(cls, votes: Counter[tuple[Format, str]], looked_at: int) -> "Decision":
        """Most votes; among equals the first in the order of the formats, so that the order of rows decides nothing."""
        by_format: Counter[Format] = Counter()
        for (format, _), count in votes.items():
            by_format[format] += count
        order = list(Format)
        best = min(by_format, key=lambda format: (-by_format[format], order.index(format)))
        why = min((-count, why) for (format, why), count in votes.items() if format is best)[1]
        return cls(best, f"{why} in {by_format[best]} of the first {looked_at} rows")


def parts(row: Row, format: Format, fields: Fields, texts: Texts) -> Parts:
    """The fields of a record (kind, prompt, text, messages, ...) that a row becomes. Raises Fault."""
    try:
        return _MAKERS[format](row, fields, texts)
    except Fault as fault:
        if fault.rule == "missing_field":
            other = recognise(row, fields)
            if other is not None and other[0] is not format:
                raise Fault("other_format", fault.field, other[0].value) from None
        raise


def _field(row: Row, name: str) -> Any:
    if name not in row:
        raise Fault("missing_field", name)
    return row[name]


def _text(row: Row, fields: Fields, texts: Texts) -> Parts:
    refuse_attached(row)
    return {"kind": TEXT, "text": texts.take(_field(row, fields.text), fields.text)}


def _prompt_completion(row: Row, fields: Fields, texts: Texts) -> Parts:
    completion = fields.of_completion(row)
    if _conversational(row, fields):
        raise Fault("other_format", fields.prompt, Format.chat.value)
    prompt = texts.take(_field(row, fields.prompt), fields.prompt)
    text = texts.take(_field(row, completion), completion)
    if any(row.get(name) not in NOTHING for name in ("system", "history", "tools", "functions")):
        chat = [*_history(row, texts), {"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
        return _made(chat, row, completion, texts)
    _refuse_false(row)
    refuse_attached(row)
    return {"kind": PROMPT_COMPLETION, "prompt": prompt, "text": text}


def _chat(row: Row, fields: Fields, texts: Texts) -> Parts:
    if "mapping" in row and "current_node" in row:
        return _made(exports.thread(row["mapping"], row["current_node"], texts), row, "mapping", texts)
    if "chat_messages" in row:
        return _made(exports.turns(row["chat_messages"], texts), row, "chat_messages", texts)
    name = fields.of_messages(row)
    if row.get(name) is None and _conversational(row, fields):
        name = fields.of_completion(row)
        said = row[name] if hold_messages(row[name]) else {"role": "assistant", "content": row[name]}
        chat = [*messages(row[fields.prompt], fields.prompt, texts), *messages(said, name, texts)]
        return _made(chat, row, fields.prompt, texts)
    return _made(messages(_field(row, name), name, texts), row, name, texts)


def _alpaca(row: Row, fields: Fields, texts: Texts) -> Parts:
    answer = _answer(row)
    chat = [
        *_history(row, texts),
        {"role": "user", "content": _instruction(row, texts)},
        {"role": "assistant", "content": texts.take(_field(row, answer), answer)},
    ]
    return _made(chat, row, answer, texts)


def _instruction(row: Row, texts: Texts) -> str:
    """With what it is about."""
    asked = texts.take(_field(row, "instruction"), "instruction")
    name = "input" if row.get("input") is not None else "context"
    given = row.get(name)
    if given is not None and (context := texts.take(given, name)):
        asked = f"{asked}\n{context}" if asked else context
    return asked


def _history(row: Row, texts: Texts) -> list[Message]:
    """The turns before the row's own."""
    chat: list[Message] = []
    history = decoded(row.get("history") or [], "history")
    for index, turn in enumerate(history if isinstance(history, list) else [history]):
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise Fault("not_a_list", f"history[{index}]", "want [question, answer]")
        for role, said in zip(("user", "assistant"), turn, strict=True):
            chat.append({"role": role, "content": texts.take(said, f"history[{index}]")})
    return chat


def _made(chat: list[Message], row: Row, field: str, texts: Texts) -> Parts:
    """Whole and in order: with the row's own system message and its tools."""
    if not chat:
        raise Fault("empty_conversation", field)
    _refuse_false(row)
    refuse_attached(row)
    given = len(chat)
    chat = with_system(chat, row, texts)
    require_order(chat, field, len(chat) - given)
    require_assistant(chat, field, len(chat) - given)
    return {
        "kind": CHAT,
        "messages": canonical(chat),
        "tools": tools(row.get("tools") or row.get("functions"), "tools", texts),
    }


def _refuse_false(row: Row) -> None:
    """Rows of unpaired preferences; in tables their labels are texts or numbers."""
    label = row.get("label")
    if label == 0 or (isinstance(label, str) and label.strip().lower() in ("false", "0", "0.0")):
        raise Fault("labelled_false", "label")


def with_system(chat: list[Message], row: Row, texts: Texts) -> list[Message]:
    system = row.get("system")
    if system is None or system == "":
        return chat
    first: Message = {"role": "system", "content": texts.take(system, "system")}
    if chat and chat[0]["role"] == "system":
        if chat[0] != first:
            raise Fault("role_order", "system", "another system message begins the chat")
        return chat
    return [first, *chat]


def _preference(row: Row, fields: Fields, texts: Texts) -> Parts:
    given = row
    if "preferred_output" in row:  # as OpenAI takes it
        inner = row.get("input")
        inner = inner if isinstance(inner, dict) else {}
        given = {fields.prompt: inner.get("messages"), "tools": inner.get("tools")}
        given |= {fields.chosen: row["preferred_output"], fields.rejected: _field(row, "non_preferred_output")}
    refuse_attached(row)
    for name in (fields.chosen, fields.rejected):
        _field(given, name)
    prompt = given.get(fields.prompt)
    if prompt is None:
        prompt = given.get(fields.of_messages(given))
        prompt = prompt or (_instruction(given, texts) if given.get("instruction") else given.get("question"))
    chosen, rejected = given[fields.chosen], given[fields.rejected]
    if fields.prompt_repeated and repeats_prompt(given, fields):
        size = len(given[fields.prompt])
        chosen, rejected = chosen[size:], rejected[size:]
    pair = preferences.pair(prompt, chosen, rejected, fields.chosen, fields.rejected, texts)
    history = [] if hold_messages(prompt) else _history(given, texts)
    before = with_system([*history, *pair.prompt], given, texts)
    require_order([*before, *pair.chosen], fields.chosen, len(before))
    require_order([*before, *pair.rejected], fields.rejected, len(before))
    return {
        "kind": PREFERENCE,
        "messages": canonical(before),
        "tools": tools(given.get("tools"), "tools", texts),
        "chosen": canonical(pair.chosen),
        "rejected": canonical(pair.rejected),
    }


_MAKERS: dict[Format, Callable[[Row, Fields, Texts], Parts]] = {
    Format.text: _text,
    Format.prompt_completion: _prompt_completion,
    Format.chat: _chat,
    Format.sharegpt: _chat,
    Format.alpaca: _alpaca,
    Format.preference: _preference,
}
