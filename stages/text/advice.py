"""What to do about rows in which no format is recognised. Apart from recognising: this guesses, so it only ever advises."""

from collections.abc import Mapping
from typing import Any

from stages.text.chats import decoded
from stages.text.faults import Fault, kind, shown

PAIRS = (
    ("prompt", "completion"),
    ("question", "answer"),
    ("query", "response"),
    ("query", "answer"),
    ("input", "output"),
    ("source", "target"),
    ("problem", "solution"),
    ("user", "assistant"),
    ("human", "bot"),
    ("prompt", "answer"),
    ("prompt", "output"),
)
BETTER = (("chosen", "rejected"), ("response_j", "response_k"), ("chosen_response", "rejected_response"))
TEXTS = ("text", "content", "raw_content", "body", "document", "article", "passage", "code", "abstract", "message")


def outlined(row: Mapping[str, Any]) -> str:
    """The fields and what stands in them, in words that tell nothing of it."""
    listed = sorted(row.items(), key=lambda item: str(item[0]))
    return ", ".join(f"{shown([name])} ({_inside(value)})" for name, value in listed[:12]) or "no fields"


def _inside(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"object of {shown(value)}"
    if isinstance(value, list):
        first = value[0] if value else None
        return "empty list" if not value else f"list of {_inside(first) if isinstance(first, Mapping) else kind(first)}"
    return kind(value)


def advised(row: Mapping[str, Any], where: str) -> str:
    """The override that would read such rows, when one suggests itself; `where` is the source's place in the config."""
    by_name = {name.strip().lower(): name for name in row if isinstance(name, str)}
    for pairs, first, second in ((BETTER, "chosen", "rejected"), (PAIRS, "prompt", "completion")):
        for one, other in pairs:
            if one in by_name and other in by_name:
                return f"perhaps {where}.{first}_field={by_name[one]} {where}.{second}_field={by_name[other]}"
    for name, value in row.items():
        if isinstance(value, Mapping) and any(isinstance(inner, list) for inner in value.values()):
            return f"the rows may be what stands in {shown([name])}: write that out, one a line"
        if isinstance(name, str) and _has_messages(value, name):
            return f"perhaps {where}.messages_field={name}"
    found = next((by_name[name] for name in TEXTS if isinstance(row.get(by_name.get(name, "")), str)), None)
    return f"perhaps {where}.text_field={found}" if found else ""


def _has_messages(value: Any, name: str) -> bool:
    try:
        value = decoded(value, name)
    except Fault:
        return False
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and any(keys <= set(first) for keys in ({"role", "content"}, {"from", "value"}))
