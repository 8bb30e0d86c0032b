"""Time and memory of the data path from 10 MB to 1 GB of generated text: ingest, clean with rules for prose and near-duplicates, tokenize.
Is the cost linear, and does memory stay bounded?

Each size is a process of its own, with a Ray of its own that is up before the clock runs. Memory is the summed PSS of all its
processes, Ray's included. Generated text of any size is equally hard: the same words, as frequent as words are, one document in ten a
copy.
"""

import json
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks import data_corpus, machine
from benchmarks.data_end_to_end import tokenizer
from benchmarks.harness import Bench, Check, Pair, Result, medians

SIZES = (10, 30, 100, 300, 1_000)
LIMIT_MB = 4_000
EVERY_S = 1.0
GROWTH = 1.15
"""A megabyte of the largest size may cost so much more than one of the middle size."""
COMPARED_MB = 30
TIMEOUT_S = 3_600.0


def run(bench: Bench) -> list[Result]:
    sizes = (1, 2) if bench.quick else SIZES
    middle, large = (1, 2) if bench.quick else (100, 1_000)
    compared = 1 if bench.quick else COMPARED_MB
    with machine.scratch() as directory:
        source, base = directory / "small", directory / "base"
        data_corpus.generated(source, sizes[0])
        tokenizer(source, base)
        bench.say(f"{compared} MB, A inline, B on Ray")
        data_corpus.generated(source, compared)
        pairs = bench.alternate(
            bench.pairs(4),
            lambda: rate(bench, directory, source, base, "inline"),
            lambda: rate(bench, directory, source, base, "ray"),
        )
        found = {}
        for size in sizes:
            shutil.rmtree(source)
            made = data_corpus.generated(source, size)
            found[size] = {**made, **once(bench, directory, source, base, "ray")}
            bench.say(f"{size} MB: {found[size]['seconds']:.1f} s, peak {found[size]['peak_mb']:.0f} MB")
    seconds = {str(size): round(one["seconds"], 2) for size, one in found.items()}
    peaks = {str(size): round(one["peak_mb"]) for size, one in found.items()}
    stages = {
        str(s): {name: round(one[name], 2) for name in ("ingest", "clean", "tokenize")} for s, one in found.items()
    }
    details = {
        "seconds_by_mb": seconds,
        "peak_mb_by_mb": peaks,
        "stages_by_mb": stages,
        "documents_by_mb": {str(size): one["documents"] for size, one in found.items()},
        "ms_per_mb": {size: round(1_000 * each / int(size), 1) for size, each in seconds.items()},
    }
    whole = [
        Check(
            "every size kept about the same share",
            _alike(found),
            json.dumps({s: one["kept"] for s, one in found.items()}),
        )
    ]
    return [
        bench.value(
            "data_scale_peak_mb",
            f"How much memory do all processes hold at most while {sizes[-1]} MB of text become packed tokens (summed PSS)?",
            unit="MB",
            values=[found[sizes[-1]]["peak_mb"]],
            limit=LIMIT_MB,
            needs_quiet=False,
            gate=whole,
            details={**details, "processes_at_peak": found[sizes[-1]]["processes"]},
        ),
        bench.value(
            "data_scale_growth",
            f"How many times as much as one of {middle} MB does a megabyte of {large} MB cost?",
            unit="times",
            values=[found[large]["seconds"] / large / (found[middle]["seconds"] / middle)],
            limit=GROWTH,
            gate=whole,
            details=details,
        ),
        bench.compare(
            "data_scale_ray_inline",
            f"How many MB a second of {compared} MB become packed tokens, on Ray with two blocks against inline?",
            unit="MB/s",
            better="higher",
            arms={"A": "executor=inline", "B": "executor=ray, blocks=2"},
            pairs=[Pair(pair.order, compared * pair.a, compared * pair.b) for pair in pairs],
            margin=0.05,
            details=medians(pairs),
        ),
    ]


def rate(bench: Bench, directory: Path, source: Path, base: Path, executor: str) -> float:
    """Times a second that the whole is done."""
    return 1 / float(once(bench, directory, source, base, executor)["seconds"])


def once(bench: Bench, directory: Path, source: Path, base: Path, executor: str) -> dict[str, Any]:
    work, log = directory / "work", directory / "log"
    work.mkdir()
    words = [str(source), str(base), str(work), "--executor", executor, "--near"]
    command = machine.python("-m", "benchmarks.data_path", *words)
    processes = machine.Processes()
    began = said = time.monotonic()
    with machine.started(command, log, machine.clean_environment()) as process:
        processes.add(process.pid)
        with machine.PeakMemory(processes, EVERY_S) as memory:
            while (code := process.poll()) is None:
                time.sleep(0.2)
                now = time.monotonic()
                if now - said > 60:
                    said = now
                    bench.say(f"{now - began:.0f} s, {memory.peak_mb:.0f} MB so far")
                if now - began > TIMEOUT_S:
                    raise RuntimeError(f"it took more than {TIMEOUT_S:.0f} s\n{machine.tail(log)}")
    if code:
        raise RuntimeError(f"the data path ended with {code}\n{machine.tail(log)}")
    shutil.rmtree(work)
    found: dict[str, Any] = json.loads(next(line for line in reversed(log.read_text().splitlines()) if line[:1] == "{"))
    return {**found, "peak_mb": memory.peak_mb, "processes": memory.at_peak}


def _alike(found: dict[int, dict[str, Any]]) -> bool:
    shares = [one["kept"] / one["documents"] for one in found.values()]
    return min(shares) > 0.5 and max(shares) - min(shares) < 0.1
