"""Runs benches one after another and prints what they found: `python -m benchmarks [name ...] [--pairs N] [--quick]`.

Results go to `benchmarks/results/`, where the documents quote them from; `--quick` sizes prove only that a bench works, so
their results go elsewhere.
"""

import argparse
import importlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.harness import BUSY_LIMIT, CHECKPOINT_MB, Bench, summary, write
from benchmarks.machine import ROOT, python

BENCHES = {
    "noop": 300,
    "hashing": 900,
    "lookup": 900,
    "empty_stages": 900,
    "orchestration": 180,
    "actor_call": 180,
    "serve_overhead": 240,
    "serve_deploy": 600,
    "serve_soak": 3600,
    "serve_servers": 1800,
    "serve_engine": 3600,
    "clean_memory": 600,
    "data_minhash": 1800,
    "data_end_to_end": 3600,
    "data_scale": 5400,
    "train_launcher": 1800,
    "train_recovery": 1200,
    "train_trl": 1800,
    "quickstart": 900,
}
"""Module with `run(bench) -> list[Result]` -> seconds after which it is ended; short ones first."""
QUIET_WAIT_S = 60.0
RESULTS = ROOT / "benchmarks" / "results"
QUICK_RESULTS = ROOT / ".raykeel" / "benchmarks"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Paired benchmarks of this machine.")
    parser.add_argument("names", nargs="*", help=f"which ones (default: all): {', '.join(BENCHES)}")
    parser.add_argument("--pairs", type=int, help="pairs of each comparison instead of the bench's own number")
    parser.add_argument("--quick", action="store_true", help="small sizes: proves that it works, measures nothing")
    parser.add_argument("--megabytes", type=int, default=CHECKPOINT_MB, help="size of the checkpoint in bench hashing")
    parser.add_argument("--output", type=Path, help="directory of the results")
    parser.add_argument("--here", action="store_true", help="run the named benches in this process, for debugging")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in BENCHES]
    if unknown or (arguments.pairs is not None and arguments.pairs < 1):
        parser.error(f"there is no bench {unknown[0]!r}" if unknown else "--pairs must be at least 1")
    directory = (arguments.output or (QUICK_RESULTS if arguments.quick else RESULTS)).resolve()
    names = arguments.names or list(BENCHES)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # unwinds: what was started is ended
    if arguments.here:
        for name in names:
            _measure(name, arguments, directory)
        return 0
    began = time.monotonic()
    broken = [name for name in names if not _in_child(name, arguments, directory)]
    results = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    results = [result for result in results if result["bench"] in names and result["bench"] not in broken]
    print(f"\n{table(results)}\n\n{len(results)} results in {directory} after {time.monotonic() - began:.0f} s")
    if broken:
        print(f"broken: {', '.join(broken)}")
    judged = [result for result in results if not result["quick"] and result["verdict"] != "INVALID"]
    missed = [result["name"] for result in judged if result["limit_met"] is False]
    if missed:
        print(f"limit missed: {', '.join(missed)}")
    return 1 if broken or missed else 0


def _measure(name: str, how: argparse.Namespace, directory: Path) -> None:
    background = machine.wait_quiet(0.0 if how.quick else QUIET_WAIT_S, BUSY_LIMIT)
    bench = Bench(name, quick=how.quick, pairs=how.pairs, background=background, megabytes=how.megabytes)
    for result in importlib.import_module(f"benchmarks.{name}").run(bench):
        write(result, directory)


def _in_child(name: str, how: argparse.Namespace, directory: Path) -> bool:
    """Each bench has a process of its own: one process can join one Ray cluster only, and a bench that hangs is ended."""
    print(f"{name} (at most {BENCHES[name] / 60:.0f} minutes)", flush=True)
    options = ["--quick"] * how.quick + (["--pairs", str(how.pairs)] if how.pairs else [])
    options += ["--megabytes", str(how.megabytes)]
    child = subprocess.Popen(python("-m", "benchmarks", name, "--here", "--output", str(directory), *options), cwd=ROOT)
    try:
        return child.wait(BENCHES[name]) == 0
    except subprocess.TimeoutExpired:
        print(f"  {name} is ended: it took too long")
        return False
    finally:
        child.terminate()
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()


def table(results: list[dict[str, Any]]) -> str:
    rows = [("result", "measured", "against", "unit")]
    for result in results:
        arms = f"{result['arms']['B']} / {result['arms']['A']}" if result["arms"] else ""
        sign = ">=" if result["better"] == "higher" else "<="
        bound = f"{sign} {result['limit']:g}" if result["limit"] is not None else ""
        rows.append((result["name"], summary(result), "; ".join(filter(None, (arms, bound))), result["unit"]))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
