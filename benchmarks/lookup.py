"""What a large sweep over a large store costs before anything runs: fingerprints of 200 points and the lookup of their results,
over stores that hold 500 to 10,000 results.

Each measurement is a process of its own that is handed points already composed (what composing took is recorded), imports what a
sweep imports, and then decides every step of every point. All results of the points are stored, so that the work is the same over
every store; the rest of a store are results that these points do not ask for.
"""

import dataclasses
import json
import pickle
import statistics
import sys
import time
from pathlib import Path

from benchmarks import machine, published
from benchmarks.harness import Bench, Check, Result, medians

POINTS = 200
SIZES = (500, 1_000, 3_000, 10_000)
LEARNING_RATES, STEPS = 20, 10
JUDGED, LARGE = 1_000, 10_000


def overrides(points: int) -> list[list[str]]:
    """A grid of trainings on one data set."""
    grid = [(rate, steps) for rate in range(LEARNING_RATES) for steps in range(STEPS)][:points]
    return [
        [f"stages.train.learning_rate={1e-4 * (rate + 1):.4g}", f"stages.train.max_steps={100 + steps}"]
        for rate, steps in grid
    ]


def run(bench: Bench) -> list[Result]:
    from pipelines.config import compose

    sizes: tuple[int, ...] = (40, 80)
    judged, large = sizes
    if not bench.quick:
        sizes, judged, large = SIZES, JUDGED, LARGE
    with machine.scratch() as directory:
        began = time.perf_counter()
        points = [compose([*point, "run.until=evaluate"]) for point in overrides(10 if bench.quick else POINTS)]
        composed = time.perf_counter() - began
        bench.say(f"{len(points)} points composed in {composed:.1f} s")
        (directory / "points").write_bytes(pickle.dumps(points))
        environ = machine.clean_environment()

        def measure(state: str) -> dict[str, float]:
            log = directory / "lookup.log"
            words = machine.python("-m", "benchmarks.lookup", str(directory / "points"), str(directory / state))
            machine.timed(words, log, environ)
            found: dict[str, float] = json.loads(log.read_text().splitlines()[-1])
            reused.append(int(found["reused"]))
            return found

        reused: list[int] = []
        small, growing = directory / "judged", directory / "growing"
        for state in (small, growing):
            made = published.complete([dataclasses.replace(point, state=str(state)) for point in points])
        base = dataclasses.replace(points[0], state=str(growing))
        published.fill(dataclasses.replace(base, state=str(small)), made, judged)
        curve, stored = {}, made
        for size in sizes:
            published.fill(base, stored, size)
            stored = size
            time.sleep(published.MEMO_S)
            measure("growing")
            seconds = [measure("growing")["seconds"] for _ in range(2 if bench.quick else 5)]
            curve[str(size)] = round(statistics.median(seconds), 4)
            bench.say(f"{size} results: {curve[str(size)]:.2f} s")
        measure("judged")
        pairs = bench.alternate(
            bench.pairs(6), lambda: measure("judged")["seconds"], lambda: measure("growing")["seconds"]
        )
    steps = 5 * len(points)
    gate = [Check("every step of every point was found", set(reused) == {steps}, f"{sorted(set(reused))} of {steps}")]
    details = {"points": len(points), "results_of_the_points": made, "compose_s": round(composed, 3)}
    return [
        bench.value(
            "lookup_seconds",
            f"How long do fingerprints and lookup of {len(points)} composed points over {judged} stored results take?",
            unit="s",
            values=[pair.a for pair in pairs],
            limit=3.0,
            gate=gate,
            details=details,
        ),
        bench.compare(
            "lookup_growth",
            f"How much longer does it take over {large} results than over {judged}?",
            unit="s",
            better="lower",
            arms={"A": f"{judged} results", "B": f"{large} results"},
            pairs=pairs,
            margin=0.05,
            limit=large / judged,
            gate=gate,
            details={**details, **medians(pairs), "seconds_by_results": curve},
        ),
    ]


def main() -> int:
    """In the measured process: points and state directory in, one line of JSON out."""
    from pipelines import session

    points = pickle.loads(Path(sys.argv[1]).read_bytes())
    for point in points:
        point.state = sys.argv[2]
    began = time.perf_counter()
    reused = sum(step.action == "reuse" for point in points for step in session.planned(point)[0])
    print(json.dumps({"seconds": time.perf_counter() - began, "reused": reused}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
