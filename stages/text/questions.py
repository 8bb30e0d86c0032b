"""What a model is asked about a row, and what becomes of its answer. Apart from who answers: a checkpoint and an endpoint are
asked the same, and the verb checks its templates with this before anything is loaded."""

import hashlib
import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.text.record import CHAT, PREFERENCE, PROMPT_COMPLETION, TEXT, Record, canonical

ROW_FIELDS = ("prompt", "text", "conversation")
"""What a prompt template may name: the row's prompt, its text, its messages as lines of `role: content`."""
ANSWER_FIELDS = (*ROW_FIELDS, "asked", "answer")
"""What a template of the new row may name besides: what the model was asked, and what it answered."""

Message = dict[str, Any]


class Unanswerable(Exception):
    """This row cannot be asked about, or its answer cannot be used: `reason` (a code) and `detail`, never the row's text."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Question:
    """What the model is given: messages of a chat, or a text that it goes on with."""

    asked: str
    """The text, or what the last message says."""
    messages: list[Message] | None
    """None: not as a chat."""
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Form:
    """How rows become questions and answers become rows."""

    template: str | None
    """The question, with names of ROW_FIELDS in braces; None: the row's own prompt, chat or beginning."""
    system: str | None
    kind: str
    """Of the new rows: text, prompt_completion or chat."""
    prompt: str
    """The new row's prompt, with names of ANSWER_FIELDS in braces."""
    text: str
    """The new row's text (of a chat: what the assistant says at the end)."""
    source: str | None
    """Name of the new rows' source; None: that of the row they came from."""

    def question(self, record: Record, *, chat: bool) -> Question:
        """Raises Unanswerable."""
        messages = conversation(record)
        if self.template is not None:
            return self._question(fill(self.template, row_values(record)), chat)
        if messages is None:
            return self._question(record.prompt if record.kind == PROMPT_COMPLETION else record.text, chat)
        if not chat:
            raise Unanswerable("chat_without_template", "the row is a chat, the model has no chat template")
        if not messages:
            raise Unanswerable("no_question", "the chat has no message before the assistant's")
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        return Question(messages[-1]["content"], messages, json.loads(record.tools) if record.tools else None)

    def _question(self, text: str, chat: bool) -> Question:
        if not text.strip():
            raise Unanswerable("no_question", "nothing to ask: the prompt is empty")
        if not chat:
            return Question(text, None)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return Question(text, [*system, {"role": "user", "content": text}])

    def record(self, origin: Record, question: Question, answer: str) -> Record:
        """The new row, under the id of the row that it came from. Raises Unanswerable."""
        values = row_values(origin) | {"asked": question.asked, "answer": answer}
        source, text = self.source or origin.source, fill(self.text, values)
        if self.kind == TEXT:
            return Record(origin.id, source, TEXT, text=text)
        if self.kind == PROMPT_COMPLETION:
            return Record(origin.id, source, PROMPT_COMPLETION, prompt=fill(self.prompt, values), text=text)
        own = self.template is None and origin.kind in (CHAT, PREFERENCE)
        before = list(question.messages or []) if own else self._opening(fill(self.prompt, values))
        messages = canonical([*before, {"role": "assistant", "content": text}])
        return Record(origin.id, source, CHAT, messages=messages, tools=origin.tools if own else "")

    def _opening(self, prompt: str) -> list[Message]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": prompt}]


def conversation(record: Record) -> list[Message] | None:
    """The messages of a chat up to where the assistant has its last turn; of a preference row its prompt; else None."""
    if record.kind not in (CHAT, PREFERENCE):
        return None
    messages: list[Message] = json.loads(record.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return messages


def row_values(record: Record) -> dict[str, str]:
    messages = json.loads(record.messages) if record.messages else []
    said = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
    return {"prompt": record.prompt, "text": record.text, "conversation": said}


def check_template(field: str, template: str, known: Sequence[str]) -> None:
    """ValueError unless the template names nothing but `known` fields."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{field} has an odd brace ({error}), got {template!r}; write {{{{ for a brace") from None
    for _, name, form, conversion in parts:
        if name is not None and (name not in known or form or conversion):
            wanted = ", ".join(f"{{{each}}}" for each in known)
            raise ValueError(f"{field} may name {wanted}, got {{{name}}}; write {{{{ for a brace")


def fill(template: str, values: Mapping[str, str]) -> str:
    """The template with its names replaced, whatever braces the values hold. Raises Unanswerable for an empty value."""
    made = []
    for literal, name, _, _ in string.Formatter().parse(template):
        made.append(literal)
        if name is not None:
            if not values[name].strip():
                raise Unanswerable("empty_field", name)
            made.append(values[name])
    return "".join(made)


def number(answer: str, pattern: str, low: float | None, high: float | None) -> float:
    """The last number in an answer that `pattern` finds (its first group, if it has one). Raises Unanswerable when there is
    none, or when it lies outside low..high."""
    matches = list(re.finditer(pattern, answer))
    if not matches:
        raise Unanswerable("no_number")
    found = matches[-1]
    try:
        value = float(found.group(1 if found.re.groups else 0))
    except (TypeError, ValueError):
        raise Unanswerable("no_number") from None
    if not ((low is None or value >= low) and (high is None or value <= high)):  # also for NaN
        raise Unanswerable("number_out_of_range")
    return value


def seed_of(seed: int, row_id: str) -> int:
    """63 bits from the run's seed and a row's id: neither neighbours nor workers change what a row's answer is drawn from."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{row_id}".encode()).digest()[:8], "big") >> 1
