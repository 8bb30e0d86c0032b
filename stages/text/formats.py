"""Which of the known formats a row is in, by the names of its fields and what stands in them. Apart from containers (a chat is a
chat in JSON Lines, CSV or Parquet) and from what a row becomes, which reads all of it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from stages.text.chats import ATTACHED, glance, hold_messages, listed

Row = Mapping[str, Any]


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


SYSTEM = ("system", "system_prompt")
"""Where a system message may stand beside a chat; the first is its usual name."""
_OTHERS = (
    "context question conversations conversation response tools functions instruction input output history mapping"
    " chat_messages label current_node preferred_output non_preferred_output"
)
KNOWN_FIELDS = frozenset((*ATTACHED, *SYSTEM, *_OTHERS.split()))


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
    if row.get(name) is not None and (style := _style(row[name])) is not None:
        keys = "role and content" if style is Format.chat else "from and value"
        return style, f"field {name} is a list of messages with {keys}"
    if "instruction" in row and (answer := answer_of(row)) in row:
        return Format.alpaca, f"fields instruction and {answer}"
    completion = fields.of_completion(row)
    if conversational(row, fields):
        return Format.chat, f"field {fields.prompt} is a list of messages, which {completion} goes on with"
    if fields.prompt in row and completion in row:
        return Format.prompt_completion, f"fields {fields.prompt} and {completion}"
    if fields.text in row:
        return Format.text, f"field {fields.text}"
    return None


def answer_of(row: Row) -> str:
    """Dolly has `response` and `context` where Alpaca has `output` and `input`."""
    return "output" if "output" in row or "response" not in row else "response"


def conversational(row: Row, fields: Fields) -> bool:
    """A prompt of messages, and what completes it: messages or a text."""
    return hold_messages(row.get(fields.prompt)) and row.get(fields.of_completion(row)) is not None


def repeats_prompt(row: Row, fields: Fields) -> bool:
    """Whether both answers of a preference in strings begin with its prompt."""
    prompt, *answers = (row.get(name) for name in (fields.prompt, fields.chosen, fields.rejected))
    return (
        isinstance(prompt, str) and prompt != "" and all(isinstance(a, str) and a.startswith(prompt) for a in answers)
    )


def _style(value: Any) -> Format | None:
    value = listed(glance(value))
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
