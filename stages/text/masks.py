"""Which part of a rendered chat the assistant wrote: from characters to tokens. Apart from rendering, because every rule
that keeps a mask right stands here.

Control tokens are hard borders of every tokenizer: the n-th in the text is the n-th among the ids. So a place in the text
is found among the ids from the control token before it and the few tokens between, without offsets, which tokenizers give in
a dozen ways. When a token reaches over the place, the text is cut there: a server's prompt ends there too.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from stages.text.control_tokens import Span

Int32 = npt.NDArray[np.int32]


class Unmaskable(Exception):
    """No mask can be shown to be right. `reason` is a code."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Answer:
    """One turn of the assistant in a rendered chat."""

    message: dict[str, Any]
    start: int | None
    """First character behind what a server renders for the messages before; None: the whole chat begins otherwise."""


@dataclass(frozen=True)
class Places:
    """From a place in the text to one among the ids."""

    text: str
    as_text: list[Span]
    """In order."""
    controls: list[Span]
    """Control tokens in the text."""
    ids: Int32
    at: npt.NDArray[np.intp]
    """Where they stand among the ids."""
    encode: Callable[[str, list[Span]], Int32]
    known: dict[int, int | None] = field(default_factory=dict)

    def of(self, place: int) -> int | None:
        """Tokens before `place`. None: a token reaches over it."""
        if place not in self.known:
            self.known[place] = self._found(place)
        return self.known[place]

    def _found(self, place: int) -> int | None:
        before = bisect_right(self.controls, place, key=lambda span: span[1])
        start, first = (self.controls[before - 1][0], int(self.at[before - 1])) if before else (0, 0)
        parts = self.as_text[bisect_left(self.as_text, (start, start)) : bisect_right(self.as_text, (place, place))]
        within = [(a - start, b - start) for a, b in parts if b <= place]
        head = self.encode(self.text[start:place], within)
        end = first + len(head)
        return end if self.ids[first:end].tobytes() == head.tobytes() else None

    def ending(self, start: int, endings: frozenset[str]) -> int | None:
        """Which control token is the first from `start` on that ends a turn."""
        first = bisect_right(self.controls, start, key=lambda span: span[0] + 1)
        for number in range(first, len(self.controls)):
            a, b = self.controls[number]
            if self.text[a:b] in endings:
                return number
        return None


def mask(
    places: Places, answers: list[Answer], endings: frozenset[str], generated: list[Span] | None
) -> npt.NDArray[np.bool_]:
    """True on what the assistant wrote in `answers`, the token that ends each among it. `generated`: what the template marks
    as written by the assistant, if it marks anything. Raises Unmaskable."""
    labelled = np.zeros(len(places.ids), np.bool_)
    free = 0
    for answer in answers:
        if answer.start is None:
            raise Unmaskable("prompt_differs" if answer is answers[-1] else "history_rewritten")
        if answer.start < free:
            raise Unmaskable("turn_without_end")
        ending = places.ending(answer.start, endings)
        if ending is None:
            raise Unmaskable("turn_without_end")
        words_end, free = places.controls[ending]
        last = int(places.at[ending])
        written = [(answer.start, words_end)] if generated is None else _marked(generated, answer.start, free)
        if not _holds("".join(places.text[start:end] for start, end in written), answer.message):
            raise Unmaskable("answer_altered")
        for start, end in written:
            first = places.of(start)
            behind = last if not places.text[end:words_end].strip() else places.of(end)
            if first is None or behind is None:
                raise Unmaskable("mark_within_token")
            labelled[first:behind] = True
        labelled[last] = True
    return labelled


def _marked(generated: list[Span], start: int, end: int) -> list[Span]:
    among = generated[bisect_left(generated, (start, start)) : bisect_left(generated, (end, end))]
    inside = [(a, b) for a, b in among if b <= max(end, a)]
    if not inside:
        raise Unmaskable("answer_unmarked")
    return inside


def _holds(turn: str, message: dict[str, Any]) -> bool:
    """Whether a turn says what the message says: templates may trim it, and leave out its reasoning, nothing else."""
    content: str = message["content"]
    said = content.strip() in turn or content.rpartition("</think>")[2].strip() in turn
    return said and all(call["function"]["name"] in turn for call in message.get("tool_calls", ()))
