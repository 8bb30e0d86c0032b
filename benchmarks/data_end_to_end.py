"""Documents a second from files to packed tokens (read, exact deduplication, quality rules, tokenize, pack, write) on real text, with two
processes: ours on Ray and inline, Hugging Face datasets with `num_proc=2`, datatrove with two workers.

Each measurement is a process of its own that times the work alone: imports, Ray's start and its first workers are done before. All
arms of a round run one after the other, in turned order from round to round, and are compared within the round. What is equal and what
the others leave out stands in `data_with_datasets.py` and `data_with_datatrove.py`; that all keep the same documents and make the same
tokens is a condition.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import alternatives, data_corpus, machine
from benchmarks.harness import Bench, Check, Pair, Result, medians

MEGABYTES, VOCABULARY = 60, 8_192
TIMEOUT_S = 600.0
ARMS = {
    "datasets": "datasets map, num_proc=2",
    "datatrove": "datatrove LocalPipelineExecutor, 2 workers",
    "inline": "raykeel, executor=inline",
    "ray": "raykeel, executor=ray, blocks=2",
}
COMPARED = {
    "data_ray_datasets": ("datasets", "ray"),
    "data_ray_datatrove": ("datatrove", "ray"),
    "data_inline_datasets": ("datasets", "inline"),
    "data_inline_datatrove": ("datatrove", "inline"),
    "data_ray_inline": ("inline", "ray"),
}
"""Name of the result -> (arm A, arm B)."""
AT_LEAST_ONE = ("data_ray_datasets", "data_ray_datatrove")


def run(bench: Bench) -> list[Result]:
    with machine.scratch() as directory:
        source, base = directory / "corpus", directory / "base"
        made = data_corpus.real(source, 2 if bench.quick else MEGABYTES)
        tokenizer(source, base)
        bench.say(f"{made['documents']:,} documents, {made['bytes'] / 1e6:.0f} MB")
        found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
        own = once(bench, directory, "datatrove", source, base, "own") if not bench.quick else {}
        for number in range(bench.pairs(6)):
            for arm in order(number):
                found[arm].append(once(bench, directory, arm, source, base))
            rates = ", ".join(f"{arm} {rate(found[arm][-1]):.0f}" for arm in ARMS)
            bench.say(f"round {number + 1}: documents/s: {rates}")
    details = {**made, "megabytes_per_second": {arm: _speed(runs, made["bytes"]) for arm, runs in found.items()}}
    details["seconds_of_stages"] = {
        arm: {name: found[arm][-1][name] for name in ("ingest", "clean", "tokenize")} for arm in ("inline", "ray")
    }
    details["cpu_seconds_on_ray"] = found["ray"][-1]["cpu_s"]
    details["ray_start_s"] = [one["start_s"] for one in found["ray"]]
    if own:
        details["datatrove_with_its_own_words"] = round(rate(own), 1)
    gate = [same(found, name) for name in ("documents", "kept", "tokens", "duplicates")]
    return [
        bench.compare(
            name,
            f"How many documents a second from files to packed tokens: {ARMS[b]} against {ARMS[a]}?",
            unit="documents/s",
            better="higher",
            arms={"A": ARMS[a], "B": ARMS[b]},
            pairs=(pairs := paired(found[a], found[b])),
            margin=0.05,
            limit=1.0 if name in AT_LEAST_ONE else None,
            gate=gate,
            details={**details, **medians(pairs), **alternatives.pinned(a)},
        )
        for name, (a, b) in COMPARED.items()
    ]


def order(number: int) -> list[str]:
    """Of a round: to and fro, so that drift favours no arm."""
    return list(ARMS) if number % 2 == 0 else list(ARMS)[::-1]


def rate(found: dict[str, Any]) -> float:
    return float(found["documents"] / found["seconds"])


def paired(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> list[Pair]:
    """Of the same round."""
    return [
        Pair("AB" if number % 2 == 0 else "BA", rate(one), rate(other))
        for number, (one, other) in enumerate(zip(a, b, strict=True))
    ]


def same(found: dict[str, list[dict[str, Any]]], name: str) -> Check:
    """All runs of all arms agree on this number."""
    numbers = {arm: sorted({one[name] for one in runs}) for arm, runs in found.items()}
    return Check(
        f"all arms have the same {name}", len({n for each in numbers.values() for n in each}) == 1, str(numbers)
    )


def tokenizer(source: Path, base: Path) -> None:
    """Trained once on the corpus, outside of what is measured; the same file for all arms."""
    from stages.text.tokenizer import train

    texts = (json.loads(line)["text"] for path in sorted(source.glob("*.jsonl")) for line in path.open("rb"))
    train((text for number, text in enumerate(texts) if number % 8 == 0 or number < 1_000), VOCABULARY, base)
    (base / "config.json").write_text("{}")


def once(bench: Bench, directory: Path, arm: str, source: Path, base: Path, words: str = "given") -> dict[str, Any]:
    """One run of one arm in an empty directory, which is gone afterwards; what it printed."""
    work, log = directory / "work", directory / f"{arm}.log"
    work.mkdir()
    places = [str(source), str(base), str(work)]
    if arm in alternatives.PINNED:
        python = str(alternatives.installed(arm, bench.say) / "python")
        program = machine.ROOT / "benchmarks" / f"data_with_{arm}.py"
        extra = [words] if arm == "datatrove" else []
        environ = alternatives.environment(directory / "home", PYTHONPATH=str(machine.ROOT), HF_HUB_OFFLINE="1")
        command = [python, str(program), *places, *extra]
    else:
        environ = machine.clean_environment()
        command = machine.python("-m", "benchmarks.data_path", *places, "--executor", arm, "--blocks", "2")
    machine.run(command, log, environ, TIMEOUT_S)
    shutil.rmtree(work)
    found: dict[str, Any] = json.loads(next(line for line in reversed(log.read_text().splitlines()) if line[:1] == "{"))
    return found


def _speed(runs: list[dict[str, Any]], size: int) -> float:
    return round(max(size / 1e6 / one["seconds"] for one in runs), 2)
