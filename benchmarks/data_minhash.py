"""Near-duplicates by MinHash with the same parameters (14 bands of 8 rows, word 5-grams): ours against datatrove's pipeline, from files to
files, and against datasketch, from texts in memory to clusters on one core; and of each the recall on pairs of known similarity.

datatrove takes words by splitting at white space (spaCy, its default for English, takes most of its time); its four steps run with two
workers. Ours on that side is ingest and clean, which also normalise, split and keep why each row left, on Ray with two blocks.
`python -m benchmarks.data_minhash TEXTS` is ours on the other side: one line of JSON.
"""

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import alternatives, data_corpus, machine
from benchmarks.harness import Bench, Check, Result, medians
from benchmarks.minhash_pairs import BANDS, NGRAM, ROWS, probability, shares, texts_of, write_pairs

MEGABYTES, IN_MEMORY = 50, 12
"""MB of text from files to files, and in memory."""
PAIRS_OF_EACH, QUICK_PAIRS = 1_500, 300
CLOSE = 0.05
RECALL = {
    "ours": "minhash_recall_ours",
    "datasketch": "minhash_recall_datasketch",
    "datatrove": "minhash_recall_datatrove",
}
"""Tool -> name of its result."""
TIMEOUT_S = 600.0


def run(bench: Bench) -> list[Result]:
    with machine.scratch() as directory:
        files, memory = directory / "files", directory / "memory"
        made = data_corpus.real(files, 1 if bench.quick else MEGABYTES)
        few = data_corpus.real(memory, 1 if bench.quick else IN_MEMORY)
        pairs_file = directory / "pairs.jsonl"
        similar = write_pairs(pairs_file, QUICK_PAIRS if bench.quick else PAIRS_OF_EACH)
        (directory / "base").mkdir()
        found: dict[str, list[dict[str, Any]]] = {}

        def measure(name: str, command: list[str], environ: dict[str, str]) -> float:
            work = directory / "work"
            work.mkdir()
            machine.run([*command, str(work)], directory / f"{name}.log", environ, TIMEOUT_S)
            shutil.rmtree(work)
            lines = (directory / f"{name}.log").read_text().splitlines()
            found.setdefault(name, []).append(json.loads(next(line for line in reversed(lines) if line[:1] == "{")))
            return float(found[name][-1]["documents"] / found[name][-1]["seconds"])

        ours = machine.clean_environment()
        recall = {
            tool: measured_recall(measure, tool, pairs_file, found, command(bench, directory, tool, "recall"))
            for tool in RECALL
        }
        rounds = bench.pairs(6)
        theirs = command(bench, directory, "datatrove", "files")
        path = machine.python("-m", "benchmarks.data_minhash", "files", str(files))
        from_files = bench.alternate(
            rounds,
            lambda: measure("datatrove", [*theirs[0], str(files)], theirs[1]),
            lambda: measure("ours", path, ours),
        )
        theirs_in_memory = command(bench, directory, "datasketch", "texts")
        texts = machine.python("-m", "benchmarks.data_minhash", "texts", str(memory))
        in_memory = bench.alternate(
            rounds,
            lambda: measure("datasketch", [*theirs_in_memory[0], str(memory)], theirs_in_memory[1]),
            lambda: measure("ours_in_memory", texts, ours),
        )
    removed = {name: found[name][-1]["removed"] for name in ("ours", "datatrove", "ours_in_memory", "datasketch")}
    return [
        bench.compare(
            "data_minhash_datatrove",
            "How many documents a second lose their near-duplicates, from files to files, against datatrove?",
            unit="documents/s",
            better="higher",
            arms={
                "A": "datatrove's four MinHash steps, 2 workers",
                "B": "raykeel's ingest and clean, executor=ray, blocks=2",
            },
            pairs=from_files,
            margin=0.05,
            limit=1.0,
            gate=[like("datatrove", found["datatrove"], found["ours"])],
            details={**made, **medians(from_files), "removed": removed, **alternatives.pinned("datatrove")},
        ),
        bench.compare(
            "data_minhash_datasketch",
            "How many documents a second are put into clusters of near-duplicates, in memory on one core, against datasketch?",
            unit="documents/s",
            better="higher",
            arms={"A": "datasketch MinHash and MinHashLSH", "B": "stages.text.minhash and clusters"},
            pairs=in_memory,
            margin=0.05,
            limit=1.0,
            gate=[like("datasketch", found["datasketch"], found["ours_in_memory"])],
            details={**few, **medians(in_memory), "removed": removed, **alternatives.pinned("datasketch")},
        ),
        *(
            bench.value(
                RECALL[tool],
                f"How far from the S-curve is the share of pairs of known similarity that {tool} finds?",
                unit="of recall, at most",
                values=[max(abs(share - probability(s)) for s, share in zip(similar, shares, strict=True))],
                limit=CLOSE,
                needs_quiet=False,
                details={
                    "pairs_of_each": QUICK_PAIRS if bench.quick else PAIRS_OF_EACH,
                    "similarity": [round(s, 4) for s in similar],
                    "found": shares,
                    "expected": [round(probability(s), 4) for s in similar],
                },
            )
            for tool, shares in recall.items()
        ),
    ]


def like(tool: str, theirs: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> Check:
    """Each finds about as many: the hash functions and what counts as a word differ, the parameters do not."""
    a, b = theirs[-1]["removed"], ours[-1]["removed"]
    return Check("both arms find about as many", 0.8 <= (b + 5) / (a + 5) <= 1.25, f"{tool} {a}, ours {b}")


def measured_recall(
    measure: Any, tool: str, pairs: Path, found: dict[str, list[dict[str, Any]]], how: tuple[list[str], dict[str, str]]
) -> list[float]:
    measure(f"recall_{tool}", [*how[0], str(pairs)], how[1])
    result: list[float] = found[f"recall_{tool}"][-1]["shares"]
    return result


def command(bench: Bench, directory: Path, tool: str, what: str) -> tuple[list[str], dict[str, str]]:
    """How to have a tool do something, but for what it is done to; and its environment."""
    if tool == "ours":
        return machine.python("-m", "benchmarks.data_minhash", what), machine.clean_environment()
    python = str(alternatives.installed(tool, bench.say) / "python")
    environ = alternatives.environment(directory / "home", PYTHONPATH=str(machine.ROOT))
    return [python, str(machine.ROOT / "benchmarks" / f"minhash_with_{tool}.py"), what], environ


def in_memory(texts: list[str]) -> dict[str, Any]:
    """Ours on one core: keys, then clusters over all bands."""
    import numpy as np

    from stages.text.clusters import components, pairs
    from stages.text.minhash import MinHash

    find = MinHash(BANDS, ROWS, NGRAM)
    find.keys(["one two three four five six"])
    began = time.perf_counter()
    keys, known = find.keys(texts)
    places = np.flatnonzero(known)
    ends = [pairs(keys[places, band], places) for band in range(BANDS)]
    members, roots = components(*(np.concatenate(side) for side in zip(*ends, strict=True)))
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "documents": len(texts), "removed": int((members != roots).sum())}


def from_files(source: Path, work: Path) -> dict[str, Any]:
    """Ingest and clean with near-duplicates, on Ray that is up."""
    from benchmarks import data_path

    start = data_path.start_ray(source, None, work / "start", 2, near=True)
    found = data_path.carry_out(source, None, work / "out", "ray", 2, near=True)
    removed = found["duplicates"] + found["near_duplicates"]
    return {**found, "removed": removed, "start_s": start}


def recall(path: Path) -> dict[str, Any]:
    from stages.text.minhash import MinHash

    find, lines = MinHash(BANDS, ROWS, NGRAM), path.read_text().splitlines()
    pairs = [json.loads(line) for line in lines]
    began = time.perf_counter()
    a, b = (find.keys([pair[side] for pair in pairs])[0] for side in ("a", "b"))
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "documents": 2 * len(pairs), "shares": shares(lines, (a == b).any(axis=1).tolist())}


def main() -> None:
    what, place, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if what == "files":
        print(json.dumps(from_files(place, work)))
    else:
        print(json.dumps(in_memory(texts_of(place)) if what == "texts" else recall(place)))


if __name__ == "__main__":
    main()
