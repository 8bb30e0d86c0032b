"""A row as turns of a chat, and what of it a model learns to write. Apart, because tokenising and evaluating must agree."""

import json
from collections.abc import Iterator
from typing import Any

from stages.text.choices import LossOn
from stages.text.record import CHAT, PROMPT_COMPLETION, Record, canonical

ASSISTANT = "assistant"
Messages = list[dict[str, Any]]


def chat_of(record: Record, as_chat: bool) -> tuple[Messages, list[Any] | None] | None:
    """(messages, tools) for a chat template; None when the row is no chat. `as_chat`: rows of prompt and completion are."""
    if record.kind == CHAT:
        return json.loads(record.messages), json.loads(record.tools) if record.tools else None
    if record.kind == PROMPT_COMPLETION and as_chat:
        return [{"role": "user", "content": record.prompt}, {"role": ASSISTANT, "content": record.text}], None
    return None


def prose(record: Record) -> Iterator[str]:
    """All that people and assistants wrote."""
    yield from (part for part in (record.prompt, record.text) if part)
    if record.messages:
        yield from (message["content"] for message in json.loads(record.messages) if message["content"])


def learned(record: Record, loss_on: LossOn) -> str:
    """The text that loss is taken on: of a chat what the assistant says and calls, its turns one a line."""
    if record.kind != CHAT:
        return record.text
    messages: Messages = json.loads(record.messages)
    if loss_on is not LossOn.all:
        messages = [message for message in messages if message["role"] == ASSISTANT]
    if loss_on is LossOn.last:
        messages = messages[-1:]
    calls = (canonical(message["tool_calls"]) if message.get("tool_calls") else "" for message in messages)
    return "\n".join(message["content"] + call for message, call in zip(messages, calls, strict=True))


def question_of(messages: Messages) -> Messages:
    """A chat up to the assistant's last turn; all of it when there is none."""
    last = max(
        (number for number, message in enumerate(messages) if message["role"] == ASSISTANT), default=len(messages)
    )
    return messages[:last]
