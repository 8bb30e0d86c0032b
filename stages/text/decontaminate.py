"""Finds parts of evaluation sets in training text. Apart, because the index is made once and read by every worker.

An n-gram is 64 bits of hash and a task's number: ten bytes for each word of the evaluation sets, in sorted arrays. Hashes are
the same in every process, so that an index may be shipped.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

REASON = "contaminated"
_WORD = re.compile(r"[぀-ヿ㐀-鿿豈-﫿]|[^\W_぀-ヿ㐀-鿿豈-﫿]+")
"""Words; where a script has no spaces, its signs."""
_BATCH = 1_000_000


def words_of(text: str) -> list[str]:
    """Lower case, without punctuation."""
    return _WORD.findall(text.lower())


@dataclass(frozen=True)
class Index:
    """What training must not hold."""

    n: int
    tasks: tuple[str, ...]
    ngrams: Hashes
    """Sorted, each once."""
    owners: npt.NDArray[np.uint16]
    """Number of the task of each n-gram; the first task in order of names where several share one."""
    wholes: Hashes
    """Of evaluation texts with fewer than n words: sorted hashes of all their words."""
    whole_owners: npt.NDArray[np.uint16]

    @classmethod
    def of(cls, texts: Mapping[str, Iterable[str]], n: int = 13) -> "Index":
        """From the texts of each task, each text read once."""
        tasks = tuple(sorted(texts))
        long: list[Hashes] = []
        short: list[Hashes] = []
        for task in tasks:
            ngrams, wholes = _hashes(texts[task], n)
            long.append(ngrams)
            short.append(wholes)
        return cls(n, tasks, *_merged(long), *_merged(short))

    def overlap(self, text: str) -> tuple[float, str | None]:
        """(share of the text's words that stand in n-grams of evaluation sets, the task with most of them or None)."""
        words = _word_hashes(text)
        if len(words) < self.n:
            found = _find(self.wholes, _whole(words)) if len(words) else np.zeros(0, np.int64)
            return (1.0, self.tasks[self.whole_owners[found[0]]]) if len(found) and found[0] >= 0 else (0.0, None)
        found = _find(self.ngrams, _ngrams(words, self.n))
        hits = found >= 0
        if not hits.any():
            return 0.0, None
        covered = np.convolve(hits, np.ones(self.n, np.int64)) > 0
        task = int(np.bincount(self.owners[found[hits]]).argmax())
        return float(covered.mean()), self.tasks[task]


@lru_cache(1 << 20)
def _hash(word: str) -> int:
    return int.from_bytes(blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


@lru_cache(8)
def _factors(count: int) -> Hashes:
    """Odd random numbers: the weighted sum of word hashes tells n-grams apart, order included."""
    return np.array([_hash(f"factor {place}") | 1 for place in range(count)], np.uint64)


def _word_hashes(text: str) -> Hashes:
    words = words_of(text)
    return np.fromiter(map(_hash, words), np.uint64, len(words))


def _ngrams(words: Hashes, n: int) -> Hashes:
    return np.lib.stride_tricks.sliding_window_view(words, n) @ _factors(n)


def _whole(words: Hashes) -> Hashes:
    return np.array([words @ _factors(len(words)) + np.uint64(len(words))], np.uint64)


def _hashes(texts: Iterable[str], n: int) -> tuple[Hashes, Hashes]:
    """(hashes of n-grams, hashes of short texts), each sorted and once."""
    long: list[Hashes] = [np.zeros(0, np.uint64)]
    short: list[Hashes] = [np.zeros(0, np.uint64)]
    waiting = 0
    for words in map(_word_hashes, texts):
        if len(words) >= n:
            long.append(_ngrams(words, n))
            waiting += len(long[-1])
        elif len(words):
            short.append(_whole(words))
        if waiting > _BATCH:
            long, waiting = [np.unique(np.concatenate(long))], 0
    return np.unique(np.concatenate(long)), np.unique(np.concatenate(short))


def _merged(by_task: list[Hashes]) -> tuple[Hashes, npt.NDArray[np.uint16]]:
    hashes = np.concatenate([np.zeros(0, np.uint64), *by_task])
    owners = np.repeat(np.arange(len(by_task), dtype=np.uint16), [len(part) for part in by_task])
    hashes, first = np.unique(hashes, return_index=True)
    return hashes, owners[first]


def _find(hashes: Hashes, wanted: Hashes) -> npt.NDArray[np.int64]:
    """Where each stands, -1 for one that is not there."""
    if not len(hashes):
        return np.full(len(wanted), -1, np.int64)
    places = np.minimum(np.searchsorted(hashes, wanted), len(hashes) - 1)
    return np.where(hashes[places] == wanted, places, -1)
