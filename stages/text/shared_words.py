"""The rows of a corpus that share the longest runs of words with a text. Apart from `decontaminate`, which looks for n-grams of one
length: here the length is what is asked for, and a row is compared whole, in one pass, whatever repeats in it.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from stages.text.decontaminate import _WORD, words_of
from stages.text.record import Record, learned

LEAST = 5
"""Words in a row; fewer are shared by chance by half of a language's texts."""
_BORDER = " "
"""Between texts: no word, so no run reaches over it."""


class Runs:
    """All runs of words of some texts, as a suffix automaton: at most two states for each word."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [-1]
        """State -> that of its longest suffix which can be followed by more."""
        self._length = [0]
        last = 0
        for text in texts:
            for word in (*words_of(text), _BORDER):
                last = self._extend(last, word)

    def _extend(self, last: int, word: str) -> int:
        made = self._state({}, self._length[last] + 1)
        while last >= 0 and word not in self._next[last]:
            self._next[last][word] = made
            last = self._shorter[last]
        if last < 0:
            self._shorter[made] = 0
            return made
        met = self._next[last][word]
        if self._length[met] == self._length[last] + 1:
            self._shorter[made] = met
            return made
        copied = self._state(dict(self._next[met]), self._length[last] + 1)
        self._shorter[copied] = self._shorter[met]
        self._shorter[met] = self._shorter[made] = copied
        while last >= 0 and self._next[last].get(word) == met:
            self._next[last][word] = copied
            last = self._shorter[last]
        return made

    def _state(self, following: dict[str, int], length: int) -> int:
        self._next.append(following)
        self._shorter.append(-1)
        self._length.append(length)
        return len(self._next) - 1

    def longest(self, words: Sequence[str]) -> tuple[int, int]:
        """(number of words of the longest run that `words` shares, index behind its last word); the first of equal ones."""
        state = length = most = end = 0
        for index, word in enumerate(words, 1):
            while state and word not in self._next[state]:
                state = self._shorter[state]
                length = self._length[state]
            if word in self._next[state]:
                state, length = self._next[state][word], length + 1
                if length > most:
                    most, end = length, index
        return most, end


@dataclass(frozen=True)
class Match:
    """A row and the longest run of words that it shares."""

    words: int
    """How many words the run has."""
    record: Record
    end: int
    """Index behind the last shared word, among the row's words."""

    @cached_property
    def shared(self) -> str:
        """The row's own text from the first shared word to the last."""
        text = learned(self.record)
        lower = text.lower()
        spans = [found.span() for found in _WORD.finditer(lower)]
        # Lowering may change lengths (of the Turkish İ); then the quote is in lower case.
        return (text if len(lower) == len(text) else lower)[spans[self.end - self.words][0] : spans[self.end - 1][1]]


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    rows: int
    """Rows that were compared."""
    sharing: int
    """Of them, those that share at least LEAST words in a row."""
    matches: list[Match]
    """Longer runs first; of equal ones as the rows stand."""


def search(texts: Iterable[str], rows: Iterable[Record], most: int) -> Found:
    """The `most` rows that share the longest runs with any of the texts. Holds no more rows than that."""
    runs = Runs(texts)
    best: list[tuple[int, int, Match]] = []
    compared = sharing = 0
    for record in rows:
        compared += 1
        words, end = runs.longest(words_of(learned(record)))
        if words < LEAST:
            continue
        sharing += 1
        heapq.heappush(best, (words, -compared, Match(words, record, end)))  # of equal ones the first rows stay
        if len(best) > most:
            heapq.heappop(best)
    return Found(compared, sharing, [match for *_, match in sorted(best, key=lambda entry: entry[:2], reverse=True)])
