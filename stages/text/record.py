"""The one form that every row takes between ingest and tokenize, whatever file it came from. Apart, because all data stages
read and write it.

Nested parts (messages, tools) travel as canonical JSON strings until they are templated: Arrow would fill one row's objects
with the keys of its neighbours', and refuses columns whose rows differ in type.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TEXT, PROMPT_COMPLETION, CHAT, PREFERENCE = KINDS = ("text", "prompt_completion", "chat", "preference")
FIELDS = ("id", "source", "kind", "prompt", "text", "messages", "tools", "chosen", "rejected")


@dataclass(frozen=True)
class Record:
    """One row. All fields are strings, empty where they do not apply to its kind."""

    id: str
    """`<file>:<line, 9 digits>`, below the source's name in a mix: rows sort as they stand in the files."""
    source: str
    """Name of the configured source."""
    kind: str
    """One of KINDS."""
    prompt: str = ""
    """prompt_completion: what the model is given."""
    text: str = ""
    """text: the document. prompt_completion: the completion."""
    messages: str = ""
    """chat: JSON list of {role, content[, tool_calls, tool_call_id, name, reasoning_content]}. preference: those of the prompt."""
    tools: str = ""
    """JSON list of function schemas that the chat may call."""
    chosen: str = ""
    """preference: JSON list of the messages that complete the prompt well."""
    rejected: str = ""
    """preference: JSON list of the messages that complete it worse."""

    def values(self) -> tuple[str, ...]:
        """In the order of the columns."""
        return (
            self.id,
            self.source,
            self.kind,
            self.prompt,
            self.text,
            self.messages,
            self.tools,
            self.chosen,
            self.rejected,
        )


def canonical(value: Any) -> str:
    """JSON with sorted keys, without white space, characters as they are; equal values are equal strings."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)


def prose(record: Record) -> str:
    """What rules about content look at: prompt and text, or what all messages say, joined by newlines."""
    if not (record.messages or record.chosen or record.rejected):
        return f"{record.prompt}{record.text}"
    parts = (json.loads(part) for part in (record.messages, record.chosen, record.rejected) if part)
    return "\n".join(message["content"] for part in parts for message in part)


def learned(record: Record) -> str:
    """All that a model may learn to write: prose, and of messages also thoughts and what tool calls pass."""
    parts = (json.loads(part) for part in (record.messages, record.chosen, record.rejected) if part)
    said = [text for part in parts for message in part for text in _learned(message)]
    return "\n".join(said) if said else prose(record)


def _learned(message: dict[str, Any]) -> Iterator[str]:
    yield from strings([message.get("reasoning_content"), message["content"]])
    for call in message.get("tool_calls") or []:
        yield from strings(call.get("function", {}).get("arguments"))


def strings(value: Any) -> Iterator[str]:
    """Every text within."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)
