"""Near-duplicates with datatrove, in its own environment: `python minhash_with_datatrove.py files|recall PLACE WORK`. Its four steps on
its own executor; words are split at white space instead of by spaCy, texts are simplified as it does by default."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.logging import logger
from datatrove.utils.word_tokenizers import WordTokenizer

from benchmarks.minhash_pairs import BANDS, NGRAM, ROWS, shares

WORKERS = 2


class Split(WordTokenizer):
    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        raise NotImplementedError

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        raise NotImplementedError


CONFIG = MinhashConfig(n_grams=NGRAM, num_buckets=BANDS, hashes_per_bucket=ROWS)


def files(source: Path, work: Path) -> dict[str, Any]:
    logger.remove()
    names = {name: str(work / name) for name in ("signatures", "buckets", "clusters", "kept")}
    steps = [
        (WORKERS, [read(source), MinhashDedupSignature(names["signatures"], CONFIG, language=Split())]),
        (BANDS, [MinhashDedupBuckets(names["signatures"], names["buckets"], config=CONFIG)]),
        (1, [MinhashDedupCluster(names["buckets"], names["clusters"], config=CONFIG)]),
        (WORKERS, [read(source), MinhashDedupFilter(names["clusters"]), JsonlWriter(names["kept"])]),
    ]
    began = time.perf_counter()
    for number, (tasks, pipeline) in enumerate(steps):
        log = str(work / f"log-{number}")
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=min(WORKERS, tasks), logging_dir=log).run()
    seconds = time.perf_counter() - began
    stats = json.loads((work / "log-3" / "stats.json").read_text())
    found = next(one["stats"] for one in stats if "MinHash stage 4" in one["name"])
    total, removed = (
        value if isinstance(value, int) else value["total"] for value in (found["total"], found.get("dropped", 0))
    )
    return {"seconds": seconds, "documents": total, "removed": removed}


def read(source: Path) -> JsonlReader:
    return JsonlReader(str(source), doc_progress=False)


def recall(path: Path, work: Path) -> dict[str, Any]:
    step = MinhashDedupSignature(str(work), CONFIG, language=Split())
    lines = path.read_text().splitlines()
    began = time.perf_counter()
    found = []
    for pair in map(json.loads, lines):
        a, b = (step.get_signature(step.get_shingles(pair[side])) for side in ("a", "b"))
        found.append(any(one == other for one, other in zip(a, b, strict=True)))
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "documents": 2 * len(lines), "shares": shares(lines, found)}


if __name__ == "__main__":
    place, work = Path(sys.argv[2]), Path(sys.argv[3])
    print(json.dumps(files(place, work) if sys.argv[1] == "files" else recall(place, work)))
