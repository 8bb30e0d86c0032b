"""The longest run of words that a text shares with each row of many. Apart, because it knows neither models nor stores: a text, rows, and
what both say."""

import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WORD = re.compile(r"\w+")


@dataclass(frozen=True, order=True)
class Shared:
    """What a row says, too."""

    words: int
    row: str
    """The row's id: file and line, for most sources."""
    text: str
    """The shared part as the row has it."""


def longest_shared(text: str, rows: Iterable[tuple[str, str]], *, least: int = 4, count: int = 5) -> list[Shared]:
    """The `count` rows that share the longest runs of at least `least` words with `text`, longest first, then by id. Words are compared in
    lower case and without what stands between them. `rows` are (id, text), read once; memory is that of `text`."""
    asked = _words(text)
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place in range(len(asked) - least + 1):
        places[tuple(asked[place : place + least])].append(place)
    best: list[tuple[int, tuple[int, ...], Shared]] = []
    if not places:
        return []
    for row, said in rows:
        found = _longest(asked, said, places, least, best[0][0] if len(best) == count else 0)
        if found is None:
            continue
        entry = (found[0], _falling(row), Shared(found[0], row, said[found[1] : found[2]]))
        (heapq.heappush if len(best) < count else heapq.heappushpop)(best, entry)
    return [shared for *_, shared in sorted(best, reverse=True)]


def _longest(
    asked: Sequence[str], said: str, places: dict[tuple[str, ...], list[int]], least: int, beyond: int
) -> tuple[int, int, int] | None:
    """(words, first character, end) of the longest run in `said`; None when none is as long as `beyond`."""
    spans = [(match.start(), match.end()) for match in WORD.finditer(said)]
    words = [said[start:end].lower() for start, end in spans]
    longest: tuple[int, int, int] | None = None
    size = max(beyond, least) - 1
    for begin in range(len(words) - least + 1):
        for place in places.get(tuple(words[begin : begin + least]), ()):
            length = least
            while (
                begin + length < len(words)
                and place + length < len(asked)
                and words[begin + length] == asked[place + length]
            ):
                length += 1
            if length > size:
                size, longest = length, (length, spans[begin][0], spans[begin + length - 1][1])
    return longest


def _words(text: str) -> list[str]:
    return [word.lower() for word in WORD.findall(text)]


def _falling(row: str) -> tuple[int, ...]:
    """Orders ids the other way round: of two equal runs the row with the smaller id is shown first."""
    return (*(-ord(letter) for letter in row), 1)
