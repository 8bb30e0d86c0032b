"""Finds texts that are nearly the same, by MinHash. Apart, because it is arithmetic alone: whole numbers in numpy, the same on
every machine and version, and several times faster than one text at a time.

A text is the set of its word n-grams. Each of `bands * rows` hash functions keeps its smallest value over that set, so two
texts agree on one with a probability equal to their Jaccard similarity s; the `rows` values of a band become one key, and
two texts meet when any band's keys are equal: with probability 1 - (1 - s^rows)^bands. With FineWeb's 14 bands of 8 rows
(Penedo et al. 2024) that is 0.05 at s = 0.5, 0.56 at 0.7, 0.77 at 0.75, 0.92 at 0.8 and 1.00 at 0.9.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
CHARACTERS_AT_ONCE = 250_000
"""Texts are hashed together up to here, so that what numpy works on stays in the processor's cache."""
_OTHER, _WORD, _ALONE = 0, 1, 2
_LAST_LETTER = 0x32400
"""No script has letters above."""
_ALONE_RANGES = (
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x2E80, 0x312F),
    (0x31A0, 0x9FFF),
    (0xF900, 0xFAFF),
)
_ALONE_FROM = 0x1B000
"""Thai, Lao, Burmese, Khmer, kana and Han write no spaces between words: each letter counts as a word."""


@dataclass(frozen=True)
class MinHash:
    """How texts become keys. Equal parameters give equal keys for ever."""

    bands: int = 14
    rows: int = 8
    ngram: int = 5

    def probability(self, similarity: float) -> float:
        """Of two texts of this Jaccard similarity to meet in at least one band."""
        return float(1 - (1 - similarity**self.rows) ** self.bands)

    def keys(self, texts: Sequence[str]) -> tuple[U64, npt.NDArray[np.bool_]]:
        """([texts, bands] keys, [texts] whether the text is long enough to have any: `ngram` words)."""
        keys = np.zeros((len(texts), self.bands), np.uint64)
        known = np.zeros(len(texts), bool)
        for first, last in _chunks(texts):
            shingles, owners = _shingles(texts[first:last], self.ngram)
            if len(shingles):
                begins = np.flatnonzero(np.r_[True, owners[1:] != owners[:-1]])
                known[first + owners[begins]] = True
                keys[first + owners[begins]] = self._bands(shingles, begins)
        return keys, known

    def _bands(self, shingles: npt.NDArray[np.uint32], begins: npt.NDArray[np.int64]) -> U64:
        """[texts, bands]: the smallest value of each hash function over each text's shingles, mixed band by band."""
        factors, terms = _functions(self.bands * self.rows)
        values = np.empty_like(shingles)
        keys = np.empty((self.bands, len(begins)), np.uint64)
        for band in range(self.bands):
            key = np.full(len(begins), band, np.uint64)
            for row in range(band * self.rows, (band + 1) * self.rows):
                np.multiply(shingles, factors[row], out=values)
                np.add(values, terms[row], out=values)
                key = _mixed(key + np.minimum.reduceat(values, begins))
            keys[band] = key
        return keys.T


def _chunks(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    first, characters = 0, 0
    for index, text in enumerate(texts):
        characters += len(text)
        if characters >= CHARACTERS_AT_ONCE:
            yield first, index + 1
            first, characters = index + 1, 0
    if first < len(texts):
        yield first, len(texts)


def _shingles(texts: Sequence[str], ngram: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Hashes of all word n-grams of the texts, one text after the other, and which text each is of. Letter case and all
    that is neither letter nor digit make no difference."""
    lowered = [text.lower() for text in texts]
    ends = np.cumsum([len(text) + 1 for text in lowered])
    points = np.frombuffer("\n".join([*lowered, ""]).encode("utf-32-le", "surrogatepass"), np.uint32)
    kinds = _kinds()[np.minimum(points, _LAST_LETTER)]
    word, alone = kinds != _OTHER, kinds == _ALONE
    joined = word[1:] & word[:-1] & ~(alone[1:] | alone[:-1])  # with the character before it
    first = np.flatnonzero(word & ~np.r_[False, joined])
    last = np.flatnonzero(word & ~np.r_[joined, False])
    # A word's hash is a polynomial of its characters: the difference of two sums, moved to where the text begins.
    power, inverse = _powers(1 << max(len(points) - 1, 1).bit_length())
    sums = np.zeros(len(points) + 1, np.uint64)
    np.cumsum((points + np.uint64(1)) * power[: len(points)], out=sums[1:])
    words = _mixed((sums[last + 1] - sums[first]) * inverse[first])
    if len(words) < ngram:
        return np.zeros(0, np.uint32), np.zeros(0, np.int64)
    owners = np.searchsorted(ends, first, side="right")
    whole = owners[: len(owners) - ngram + 1] == owners[ngram - 1 :]
    hashes = np.zeros(len(whole), np.uint64)
    for place in range(ngram):
        hashes = hashes * _BASE + words[place : place + len(whole)]
    return (_mixed(hashes[whole]) >> np.uint64(32)).astype(np.uint32), owners[: len(whole)][whole]


_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))


def _mixed(values: U64) -> U64:
    """SplitMix64's finish: each bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@cache
def _functions(count: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Factors (odd, so that no two values meet) and terms of the hash functions x -> factor * x + term modulo 2^32."""
    drawn = _mixed(np.arange(1, 2 * count + 1, dtype=np.uint64) * _BASE).astype(np.uint32)
    return drawn[:count] | np.uint32(1), drawn[count:]


@cache
def _powers(count: int) -> tuple[U64, U64]:
    power, inverse = np.full(count, _BASE), np.full(count, _INVERSE)
    power[0] = inverse[0] = 1
    return np.cumprod(power, dtype=np.uint64), np.cumprod(inverse, dtype=np.uint64)


@cache
def _kinds() -> npt.NDArray[np.uint8]:
    """What each code point is. Marks belong to the letters that carry them."""
    kinds = np.zeros(_LAST_LETTER + 1, np.uint8)
    for point in range(_LAST_LETTER):
        if unicodedata.category(chr(point))[0] in "LNM":
            alone = (point >= _ALONE_FROM and point < 0x1E000) or any(
                low <= point <= high for low, high in _ALONE_RANGES
            )
            kinds[point] = _ALONE if alone or point >= 0x20000 else _WORD
    return kinds
