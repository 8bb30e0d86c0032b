"""What to do about lines that are no rows, and rows in which no format is recognised. Apart from reading and recognising: this
guesses, so it only ever advises."""

import json
import re
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
    found = next((by_name[name] for name in TEXTS if name in by_name and isinstance(row[by_name[name]], str)), None)
    return f"perhaps {where}.text_field={found}" if found else ""


def _has_messages(value: Any, name: str) -> bool:
    try:
        value = decoded(value, name)
    except Fault:
        return False
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and any(keys <= set(first) for keys in ({"role", "content"}, {"from", "value"}))


def looks_otherwise(line: bytes, error: json.JSONDecodeError) -> str:
    """What else is often taken for a line of JSON, by its looks."""
    said, written = error.doc, line.strip()
    if written.startswith(b"<"):
        return "; is it a page of HTML?"
    if written.startswith(b"\xef\xbb\xbf"):
        return "; a byte-order mark stands in the middle of the file, where files were joined: take it out"
    if b"\r" in written and error.msg == "Extra data":
        return "; the lines end in \\r alone: write \\n"
    if error.msg == "Extra data":
        return "; a comma ends the line" if said[error.pos :].strip() == "," else "; more than one value in a line"
    if re.match(rb"\{\s*'", written) or re.match(r"None|True|False", said[error.pos :]):
        return "; is it Python's way to write it? use json.dumps"
    return ""


def listed_messages(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict) and {"role", "from"} & value[0].keys():
        return ' of messages; want {"messages": [...]}'
    return ""


def looks_like_json(is_first: bool, line: bytes) -> str:
    """One JSON document under a name that promises one object a line is common."""
    first = b"".join(line[:80].split()) if is_first else b""
    return "; is it JSON, not JSON Lines? container=json" if first == b"{" or first[:1] == b"[" else ""
