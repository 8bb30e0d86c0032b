"""What a chat template can do, found by rendering small chats of known words. Apart from rendering real chats: templates
ignore what they do not know (system turns, tools) without a word, and each end of a turn must be known before a mask is made.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]
Render = Callable[[Messages, list[Any] | None, bool], str]
"""Messages, tools, whether the assistant's turn is opened at the end. Raises what a template raises."""

SYSTEM = {"role": "system", "content": "systemword"}
USER = {"role": "user", "content": "userword"}
ANSWER = {"role": "assistant", "content": "answerword"}
LATER = [{"role": "user", "content": "laterword"}, {"role": "assistant", "content": "closingword"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "toolword",
        "description": "describeword",
        "parameters": {"type": "object", "properties": {"keyword": {"type": "string", "description": "propertyword"}}},
    },
}
CALL_ID = "callword"
"""With a number nine letters and digits: some templates refuse others."""


@dataclass(frozen=True)
class Traits:
    """What was found."""

    system: bool
    """A system turn is rendered."""
    tools: bool
    """The functions that may be called are rendered."""
    calls: bool
    """So are the assistant's calls, their arguments as JSON that is encoded once, and what tools returned."""
    arguments_as_text: bool
    """The template wants the arguments of a call as JSON text, not as an object."""
    endings: tuple[str, ...]
    """Control tokens that end an assistant's turn. Empty: the turns have no end, and no model can learn to stop."""
    behind: str | None
    """What follows an answer. None: the answer itself is not found, the template writes something else."""


def find(render: Render, control: re.Pattern[str]) -> Traits:
    """Traits of the template that `render` renders."""
    ended, rest = _plain_ending(_try(render, [USER, ANSWER, *LATER]) or "", control)
    tools = "toolword" in (_try(render, [USER], [TOOL]) or "")
    calls, as_text, call_ended = _calls(render, control)
    endings = tuple(dict.fromkeys(end for end in (ended, call_ended) if end))
    return Traits(
        system="systemword" in (_try(render, [SYSTEM, USER]) or ""),
        tools=tools,
        calls=calls,
        arguments_as_text=as_text,
        endings=endings if ended else (),
        behind=rest,
    )


def _plain_ending(text: str, control: re.Pattern[str]) -> tuple[str | None, str | None]:
    """The control token right behind an answer, and all that stands between the answer and the next turn's words."""
    if "answerword" not in text:
        return None, None
    between = text.partition("answerword")[2].partition("laterword")[0]
    found = control.match(between, len(between) - len(between.lstrip()))
    return (found[0] if found else None), between


def _calls(render: Render, control: re.Pattern[str]) -> tuple[bool, bool, str | None]:
    """Whether calls are rendered, whether from text, and the control token that ends a turn of them. Some templates refuse
    two calls at once."""
    for values in (["firstword", "valueword"], ["valueword"]):
        for as_text in (False, True):
            turn, *results = _turns(values, as_text)
            text = _try(render, [USER, turn, *results, ANSWER, *LATER], [TOOL])
            if text is None or not all(_shown(value, text) for value in values) or "resultword" not in text:
                continue
            # What a chat that ends here and one that goes on have in common is the turn's; its last control token ends it.
            tail, partial = text.partition("valueword")[2], (_try(render, [USER, turn], [TOOL]) or text)
            common = _common(tail.partition("resultword")[0], partial.partition("valueword")[2])
            found = [match[0] for match in control.finditer(common)]
            ended = found[-1] if found else None
            within = text.partition(values[0])[2].partition("valueword")[0] if len(values) > 1 else ""
            if ended is not None and ended not in within:
                return True, as_text, ended
    return False, False, None


def _turns(values: list[str], as_text: bool) -> Messages:
    """An assistant's turn with a call for each value, and what the tool returned."""
    calls, results = [], []
    for number, value in enumerate(values, 1):
        arguments = {"keyword": value}
        called = {"name": "toolword", "arguments": json.dumps(arguments) if as_text else arguments}
        calls.append({"id": CALL_ID + str(number), "type": "function", "function": called})
        results.append(
            {"role": "tool", "tool_call_id": CALL_ID + str(number), "name": "toolword", "content": "resultword"}
        )
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


def _shown(value: str, text: str) -> bool:
    """As JSON or as pairs; neither as Python writes an object (`'keyword'`) nor as JSON within JSON (`\\"keyword`)."""
    return "toolword" in text and re.search(rf"keyword[^\w'\\]+{value}", text) is not None


def _common(one: str, other: str) -> str:
    length = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _try(render: Render, messages: Messages, tools: list[Any] | None = None) -> str | None:
    try:
        return render(messages, tools, False)
    except Exception:  # templates raise whatever jinja and Python have
        return None
