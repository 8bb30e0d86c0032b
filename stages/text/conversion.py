"""What a row becomes: the fields of the canonical record, by the format that its source is in. Apart from telling formats, which
looks at names and kinds alone: here everything is read, and what cannot be used is said.
"""

from collections.abc import Callable
from typing import Any

from stages.text import exports, preferences
from stages.text.chats import (
    Message,
    Texts,
    decoded,
    decoded_object,
    hold_messages,
    messages,
    refuse_attached,
    tools,
)
from stages.text.dialogue import require_assistant, require_order
from stages.text.faults import Fault
from stages.text.formats import (
    SYSTEM,
    Fields,
    Format,
    Row,
    answer_of,
    conversational,
    recognise,
    repeats_prompt,
)
from stages.text.record import CHAT, PREFERENCE, PROMPT_COMPLETION, TEXT, canonical

Parts = dict[str, str]
NOTHING: tuple[Any, ...] = (None, "", [], {}, "[]")
"""What stands in a field that a row does not use; the last in tables, whose values are texts."""


def parts(row: Row, format: Format, fields: Fields, texts: Texts) -> Parts:
    """The fields of a record (kind, prompt, text, messages, ...) that a row becomes. Raises Fault."""
    try:
        return _MAKERS[format](row, fields, texts)
    except RecursionError:  # an image's facts, say, which nobody keeps and everybody looks through
        raise Fault("nested_too_deeply") from None
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
    if conversational(row, fields):
        raise Fault("other_format", fields.prompt, Format.chat.value)
    prompt = texts.take(_field(row, fields.prompt), fields.prompt)
    text = texts.take(_field(row, completion), completion)
    if any(row.get(name) not in NOTHING for name in (*SYSTEM, "history", "tools", "functions")):
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
    if row.get(name) is None and conversational(row, fields):
        name = fields.of_completion(row)
        said = row[name] if hold_messages(row[name]) else {"role": "assistant", "content": row[name]}
        chat = [*messages(row[fields.prompt], fields.prompt, texts), *messages(said, name, texts)]
        return _made(chat, row, fields.prompt, texts)
    return _made(messages(_field(row, name), name, texts), row, name, texts)


def _alpaca(row: Row, fields: Fields, texts: Texts) -> Parts:
    answer = answer_of(row)
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
        "tools": _tools(row, texts),
    }


def _refuse_false(row: Row) -> None:
    """Rows of unpaired preferences; in tables their labels are texts or numbers."""
    label = row.get("label")
    if label == 0 or (isinstance(label, str) and label.strip().lower() in ("false", "0", "0.0")):
        raise Fault("labelled_false", "label")


def _tools(row: Row, texts: Texts) -> str:
    """The functions that may be called, under their name or their older one."""
    found, older = (tools(row.get(name), name, texts) for name in ("tools", "functions"))
    if found and older and found != older:
        raise Fault("two_values", "functions", "tools has others")
    return found or older


def with_system(chat: list[Message], row: Row, texts: Texts) -> list[Message]:
    said = {name: texts.take(row[name], name) for name in SYSTEM if row.get(name) not in (None, "")}
    if not said:
        return chat
    (name, content), *others = said.items()
    if any(other != content for _, other in others):
        raise Fault("two_values", others[0][0], f"{name} has another")
    first: Message = {"role": "system", "content": content}
    if chat and chat[0]["role"] == "system":
        if chat[0] != first:
            raise Fault("role_order", name, "another system message begins the chat")
        return chat
    return [first, *chat]


def _preference(row: Row, fields: Fields, texts: Texts) -> Parts:
    given = row
    if "preferred_output" in row:  # as OpenAI takes it
        inner = decoded_object(row.get("input"), "input")
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
        "tools": _tools(given, texts),
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
