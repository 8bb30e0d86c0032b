"""Near-duplicates with datasketch, in its own environment: `python minhash_with_datasketch.py texts|recall PLACE WORK`. Words are split at
white space and lower-cased, 5-grams are hashed in batches; MinHashLSH gets the bands and rows as they are, clusters are its matches."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from datasketch import MinHash, MinHashLSH

from benchmarks.minhash_pairs import BANDS, NGRAM, ROWS, shares, texts_of


def signature(text: str) -> MinHash | None:
    words = text.lower().split()
    if len(words) < NGRAM:
        return None
    found = MinHash(num_perm=BANDS * ROWS)
    found.update_batch([" ".join(words[at : at + NGRAM]).encode() for at in range(len(words) - NGRAM + 1)])
    return found


def index() -> MinHashLSH:
    return MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))


def clusters(texts: list[str]) -> dict[str, Any]:
    began = time.perf_counter()
    parent = list(range(len(texts)))

    def root(place: int) -> int:
        while parent[place] != place:
            parent[place] = parent[parent[place]]
            place = parent[place]
        return place

    lsh = index()
    for place, text in enumerate(texts):
        found = signature(text)
        if found is None:
            continue
        for other in lsh.query(found):
            a, b = sorted((root(place), root(other)))
            parent[b] = a
        lsh.insert(place, found, check_duplication=False)
    removed = sum(root(place) != place for place in range(len(texts)))
    return {"seconds": time.perf_counter() - began, "documents": len(texts), "removed": removed}


def recall(path: Path) -> dict[str, Any]:
    lines = path.read_text().splitlines()
    began = time.perf_counter()
    found = []
    for pair in map(json.loads, lines):
        lsh = index()
        lsh.insert("a", signature(pair["a"]))
        found.append(bool(lsh.query(signature(pair["b"]))))
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "documents": 2 * len(lines), "shares": shares(lines, found)}


if __name__ == "__main__":
    place = Path(sys.argv[2])
    print(json.dumps(clusters(texts_of(place)) if sys.argv[1] == "texts" else recall(place)))
