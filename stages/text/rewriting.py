"""Changes what a row says, wherever its kind keeps it. Apart, because repair, comparison and masking must reach the same
strings; what none of them changes stays as it stands in the file, byte for byte."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stages.text.record import Record, canonical, prose

Change = Callable[[str], str]
SPOKEN = ("content", "reasoning_content")
"""What a message says. Its role, names and ids are not changed: others refer to them."""


def is_nested(record: Record) -> bool:
    """Whether what the row says stands in messages."""
    return bool(record.messages or record.chosen or record.rejected)


def turns(record: Record) -> str:
    """What near-duplicates are told by: what the row says, without system messages: one of 500 words before each chat would
    make all chats alike."""
    if not is_nested(record):
        return prose(record)
    parts = (json.loads(part) for part in (record.messages, record.chosen, record.rejected) if part)
    return "\n".join(message["content"] for part in parts for message in part if message["role"] != "system")


def rewritten(record: Record, change: Change) -> Record:
    """The row with `change` applied to prompt, text, what messages say and strings among the arguments of tool calls; the
    row itself where nothing changes."""
    new = {name: change(value) for name in ("prompt", "text") if (value := getattr(record, name))}
    new |= {
        name: _messages(value, change)
        for name in ("messages", "chosen", "rejected")
        if (value := getattr(record, name))
    }
    if all(value == getattr(record, name) for name, value in new.items()):
        return record
    return replace(record, **new)


def _messages(text: str, change: Change) -> str:
    messages = json.loads(text)
    changed = [_message(message, change) for message in messages]
    return text if changed == messages else canonical(changed)


def _message(message: dict[str, Any], change: Change) -> dict[str, Any]:
    new = {
        name: change(value) if name in SPOKEN and isinstance(value, str) else value for name, value in message.items()
    }
    if calls := message.get("tool_calls"):
        new["tool_calls"] = [_call(call, change) for call in calls]
    return new


def _call(call: dict[str, Any], change: Change) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": _strings(function["arguments"], change)}}


def _strings(value: Any, change: Change) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {key: _strings(item, change) for key, item in value.items()}
    return value
