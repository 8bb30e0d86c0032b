"""Memory of the driver while clean works on more rows than it may hold: no row's text should ever be in this process.

As a bench it starts itself as a process of its own, whose peak resident size is the number:
`python -m benchmarks.clean_memory --megabytes 500` prints that process's findings as one line of JSON.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import bare, machine
from benchmarks.harness import Bench, Check, Result

WORDS = 5_000
ROW_CHARACTERS = 1_000
DUPLICATES = 0.1
LIMIT_MB = 500


def run(bench: Bench) -> list[Result]:
    megabytes = 20 if bench.quick else 500
    with machine.scratch() as directory:
        log = directory / "log"
        command = [sys.executable, "-m", "benchmarks.clean_memory", "--megabytes", str(megabytes), "--directory"]
        machine.run([*command, str(directory)], log, machine.clean_environment(), timeout_s=900)
        found = json.loads(log.read_text().strip().rpartition("\n")[2])
    bench.say(f"driver {found['peak_mb']:.0f} MB, {found['seconds']:.0f} s")
    return [
        bench.value(
            "clean_driver_peak_mb",
            f"How much memory does the driver use while {megabytes} MB of rows go through clean?",
            unit="MB",
            values=[found["peak_mb"]],
            limit=LIMIT_MB,
            needs_quiet=False,
            gate=[Check("every row stayed or left with a reason", found["rows_in"] == found["rows_seen"], str(found))],
            details=found,
        )
    ]


def generate(directory: Path, megabytes: int) -> None:
    """Rows of about a thousand characters, one in ten a repetition; about `megabytes` MB of text."""
    from stages.artifacts import Rows
    from stages.text.record import Record
    from stages.text.shards import ROWS_SCHEMA, ShardWriter

    chance = random.Random(0)
    words = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(2, 9))) for _ in range(WORDS)]
    directory.mkdir(parents=True, exist_ok=True)
    written, count, text = 0, 0, ""
    with ShardWriter(directory / "rows", ROWS_SCHEMA) as writer:
        while written < megabytes * 1_000_000:
            if not text or chance.random() >= DUPLICATES:
                text = " ".join(chance.choices(words, k=ROW_CHARACTERS // 6)) + f" {count}"
            writer.write(*Record(f"row:{count:09d}", "generated", "text", text=text).values())
            written += len(text)
            count += 1
    Rows.write(directory, {"rows": count, "characters": written})


def measure(directory: Path, megabytes: int) -> dict[str, Any]:
    """Clean the generated rows with this process as the driver; its peak resident size and what came out."""
    import ray

    from stages.artifacts import Rows
    from stages.clean import CleanConfig, clean

    source, output, work = directory / "in", directory / "out", directory / "work"
    source.mkdir()
    # Not in this process, whose peak is measured.
    script = f"from benchmarks.clean_memory import *; generate(Path({str(source)!r}), {megabytes})"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=machine.ROOT)
    for path in (output, work):
        path.mkdir()
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", num_cpus=2)
    import ray.data

    before = resident_mb("VmRSS")  # with Ray Data loaded: the floor below the peak
    began = time.perf_counter()
    corpus = clean(CleanConfig(), bare.context(output, work), Rows(uri=source.as_uri()))
    seconds = time.perf_counter() - began
    facts = corpus.summary()
    steps = {step["step"]: step["rows"] for step in facts["waterfall"]}
    found = {
        "megabytes": megabytes,
        "peak_mb": resident_mb("VmHWM"),
        "before_mb": before,
        "seconds": round(seconds, 2),
        "rows_in": steps["in"],
        "rows_seen": facts["rows"] + sum(steps[reason] for reason in facts["reasons"]),
        "duplicates": steps["exact_duplicate"] + steps["duplicate"],
    }
    ray.shutdown()
    return found


def resident_mb(name: str) -> float:
    """VmRSS (now) or VmHWM (peak) of this process."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return round(int(found.group(1)) / 1000, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500, help="size of the generated text (default: 500)")
    parser.add_argument("--directory", type=Path, help="an empty directory to work in (default: a temporary one)")
    arguments = parser.parse_args()
    if arguments.directory:
        print(json.dumps(measure(arguments.directory, arguments.megabytes)))
    else:
        with machine.scratch() as directory:
            print(json.dumps(measure(directory, arguments.megabytes)))


if __name__ == "__main__":
    main()
