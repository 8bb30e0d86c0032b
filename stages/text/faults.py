"""Why a row cannot be used: a code to be counted, the field, and a word about it, never the row's text, which may be private.
Apart, because readers and formats both say it, and people look the codes up.
"""

import re
from collections.abc import Iterable
from typing import Any

RULES = {
    "broken_json": "the line is not JSON",
    "cut_off": "the file ends in the middle of its last row",
    "not_an_object": 'the row is JSON, but no object such as {"text": ...} or {"messages": [...]}',
    "repeated_key": "a key that stands twice in one object with two values: one of them would be lost",
    "broken_csv": "quotes that do not match; a quote within a quoted value is written twice",
    "column_count": "more or fewer values than the header has columns",
    "repeated_header": "the header once more, as it stands between files that were joined",
    "row_too_long": "longer than stages.ingest.max_row_bytes; its bytes were skipped",
    "invalid_utf8": "bytes that are not UTF-8: save the file as such (Excel: CSV UTF-8; encoding_errors=replace puts U+FFFD instead)",
    "lone_surrogate": "half of a character from UTF-16 (encoding_errors=replace puts U+FFFD in its place)",
    "nul_character": "U+0000 in a text (encoding_errors=replace puts U+FFFD in its place)",
    "missing_field": "a field that the format needs is not there",
    "other_format": "the row is of another format than most of the source's first rows: give each format a source of its own (mix)",
    "not_text": "a number, a list or null where a text is wanted",
    "not_a_list": "something else where a list is wanted",
    "not_a_message": "a message that is no object with role and content",
    "empty_conversation": "a chat without messages",
    "unknown_role": "a role that is none of system, user, assistant, tool or their other names (human, gpt, model, observation, ...)",
    "role_order": "a system message that is not the first, or a tool's answer that follows no call",
    "no_assistant_turn": "no assistant message says or calls anything, so there is nothing to learn",
    "null_content": "a message without content and without a tool call",
    "unsupported_content_part": "a part of a message that is not text (an image, audio, a file, a tool call in another program's form)",
    "unsupported_weight": "a message that is not to be learned (weight 0, train false); stages.tokenize.loss_on=last learns one",
    "labelled_false": "an answer whose `label` is false or 0 (unpaired preferences): it is not to be learned",
    "attachment": "a row about an image, a recording or a file whose content is not in it",
    "orphan_tool_call_id": "a tool's answer to a call that was not made before: by its id, or by its function's name where it has none",
    "unanswered_tool_call": "a tool call that is followed by something else than its answer",
    "broken_tool_call": "a tool call without a function's name, or whose arguments are not a JSON object",
    "broken_tools": "tools that are no list of function schemas",
    "empty_answer": "an answer that is empty: a model would learn to say nothing",
    "same_answers": "the preferred answer is the rejected one",
    "two_prompts": "the preferred and the rejected answer belong to different prompts",
    "nested_too_deeply": "objects and lists more than 100 deep in one another, in tools or in what a call passes",
    "two_values": "one thing under two names, such as function_call and tool_calls, with two values: one of them would be lost",
    "broken_export": "a conversation tree whose current message or a parent is missing",
}
"""Code -> what it means."""

_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ .-]{0,39}")


class Fault(Exception):
    """One row's. `rule` is one of RULES; `detail` says where in the row or what was found there."""

    def __init__(self, rule: str, field: str = "", detail: str = "") -> None:
        super().__init__(rule, field, detail)
        self.rule, self.field, self.detail = rule, field, detail


def shown(names: Iterable[Any], limit: int = 8) -> str:
    """Names of fields for a message. What does not look like a name may be a row's text: its length alone is shown."""
    listed = [
        name if isinstance(name, str) and _WORD.fullmatch(name) else f"({len(str(name))} characters)" for name in names
    ]
    return ", ".join(listed[:limit]) + (", ..." if len(listed) > limit else "") or "none"


def word(value: Any) -> str:
    """A value that should be one of few words, when it is at least a short word."""
    return value if isinstance(value, str) and re.fullmatch(r"[a-z_]{1,24}", value) else kind(value)


def kind(value: Any) -> str:
    """The type of a value in JSON's words."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "text", list: "list", dict: "object", bytes: "bytes"}
    return names.get(type(value), type(value).__name__)
