"""What all arms of the near-duplicate bench share: parameters, pairs of texts of known similarity, the share of them
found. Apart and of the standard library alone, because programs in other environments import it."""

import json
import random
import string
from collections.abc import Iterable, Sequence
from pathlib import Path

BANDS, ROWS, NGRAM = 14, 8, 5
SIMILARITIES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
SHINGLES = 200
"""5-grams of each text of a pair."""


def probability(similarity: float) -> float:
    return float(1 - (1 - similarity**ROWS) ** BANDS)


def write_pairs(path: Path, count: int) -> list[float]:
    """`count` pairs of texts for each similarity, a line each: {"similarity", "a", "b"}. The similarities that came out."""
    chance = random.Random(0)
    reached = []
    with path.open("w", encoding="utf-8") as file:
        for wanted in SIMILARITIES:
            both = round(2 * SHINGLES * wanted / (1 + wanted))
            reached.append(both / (2 * SHINGLES - both))
            for _ in range(count):
                words = distinct(chance, 2 * (SHINGLES + NGRAM - 1))
                shared = words[: both + NGRAM - 1]
                alone = SHINGLES - both
                a, b = words[len(shared) :][:alone], words[len(shared) + alone :][:alone]
                said = {"similarity": wanted, "a": " ".join([*shared, *a]), "b": " ".join([*shared, *b])}
                file.write(json.dumps(said) + "\n")
    return reached


def distinct(chance: random.Random, count: int) -> list[str]:
    """Words of letters, each once: every 5-gram of a text is its own."""
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(chance.choices(string.ascii_lowercase, k=7))] = None
    return list(words)


def shares(lines: Iterable[str], found: Sequence[bool]) -> list[float]:
    """Share of the pairs found, by similarity."""
    hits: dict[float, list[bool]] = {}
    for line, hit in zip(lines, found, strict=True):
        hits.setdefault(json.loads(line)["similarity"], []).append(bool(hit))
    return [round(sum(each) / len(each), 4) for each in hits.values()]


def texts_of(source: Path) -> list[str]:
    return [json.loads(line)["text"] for path in sorted(source.glob("*.jsonl")) for line in path.open("rb")]
