"""Five steps that do nothing, one after another: what a run costs beyond the work. Ours against Metaflow and against Dagster with its
default (multiprocess) executor, from the command line in every arm, whole processes from start to end.

Each step of each tool reads the number that the step before kept, adds one and keeps it in its tool's own way (an artifact of the store,
a Metaflow artifact, Dagster's default IO manager). Every tool has run once before, so that its databases exist, and so that ours finds
the process that keeps MLflow open. What a run takes that does not find it is measured apart, and so is that process's start.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import alternatives, links, machine
from benchmarks.harness import Bench, Check, Pair, Result, medians
from pipelines import desk, scribe
from pipelines.config import AppConfig
from pipelines.desk import Desk
from pipelines.dictation import Dictation

STEPS = 5
RESULTS = {"metaflow": "empty_stages_metaflow", "dagster": "empty_stages_dagster"}
"""Alternative -> name of its result."""
METAFLOW = """from metaflow import FlowSpec, step


class Chain(FlowSpec):
    @step
    def start(self):
        self.value = 1
        self.next(self.s1)

{between}
    @step
    def end(self):
        self.value += 1
        print("value", self.value)


if __name__ == "__main__":
    Chain()
"""
METAFLOW_STEP = """    @step
    def s{n}(self):
        self.value += 1
        self.next(self.{following})
"""
DAGSTER = """from dagster import job, op


@op
def s0() -> int:
    return 1

{between}
@op
def last(context, value: int) -> int:
    context.log.info(f"value {{value + 1}}")
    return value + 1


@job
def chain():
    last({call})
"""
DAGSTER_STEP = """
@op
def s{n}(value: int) -> int:
    return value + 1

"""


@dataclass(frozen=True)
class Arm:
    """One tool: how to run the steps once, and what its log says when they did."""

    label: str
    run: Callable[[], float]
    log: Path
    done: str

    def check(self) -> Check:
        return Check(f"{self.label}: the last step saw all before it", self.done in self.log.read_text(), self.done)


def metaflow_source(steps: int = STEPS) -> str:
    names = [f"s{n}" for n in range(1, steps - 1)]
    chain = zip(names, [*names[1:], "end"], strict=True)
    return METAFLOW.format(between="\n".join(METAFLOW_STEP.format(n=name[1:], following=then) for name, then in chain))


def dagster_source(steps: int = STEPS) -> str:
    call = "s0()"
    for n in range(1, steps - 1):
        call = f"s{n}({call})"
    return DAGSTER.format(between="".join(DAGSTER_STEP.format(n=n) for n in range(1, steps - 1)), call=call)


def run(bench: Bench) -> list[Result]:
    with machine.scratch() as directory:
        ours, on_ray = _ours(directory, "link"), _ours(directory, "ray_link")
        theirs = {"metaflow": _metaflow(bench, directory), "dagster": _dagster(bench, directory)}
        for arm in (ours, *theirs.values()):
            arm.run()
        measured = {}
        for name, arm in theirs.items():
            bench.say(f"A is {arm.label}, B is ours")
            measured[name] = bench.alternate(bench.pairs(6), arm.run, ours.run)
        cold, opened = _cold(bench, directory, ours)
        started, whole = _with_ray(bench, directory, on_ray)
        gate = [arm.check() for arm in (ours, *theirs.values())]
        asked_for_ray = on_ray.check()
        found_cold = Check(
            "no process kept MLflow open", len(cold) == bench.pairs(6), f"{len(cold)} runs began without one"
        )
    results = [
        _compared(
            bench,
            name,
            theirs[name].label,
            pairs,
            [check for check in gate if name in check.name or "ours" in check.name],
        )
        for name, pairs in measured.items()
    ]
    slowest = {f"{name}_median": medians(pairs)["median_a"] for name, pairs in measured.items()}
    return [
        *results,
        bench.value(
            "empty_ray_stages_seconds",
            f"How long do {STEPS} empty stages take that ask for Ray, which is up?",
            unit="s",
            values=whole,
            limit=min(slowest.values()),
            gate=[asked_for_ray],
            details={"steps": STEPS, **slowest},
        ),
        bench.value(
            "empty_cold_stages_seconds",
            f"How long do {STEPS} empty stages take when no process keeps MLflow open, as after a pause?",
            unit="s",
            values=cold,
            limit=min(slowest.values()),
            gate=[found_cold],
            details={"steps": STEPS, **slowest},
        ),
        bench.value(
            "scribe_start_seconds",
            "How long does the process that keeps MLflow open take until a run can be recorded, once for all runs?",
            unit="s",
            values=opened,
            details={"stays_s": scribe.IDLE_S},
        ),
        bench.value(
            "ray_start_seconds",
            "How long does this project's Ray take to start, once for all runs?",
            unit="s",
            values=[started],
            details={"idle_head": "kept until make down"},
        ),
    ]


def _compared(bench: Bench, name: str, label: str, pairs: list[Pair], gate: list[Check]) -> Result:
    return bench.compare(
        RESULTS[name],
        f"How long do {STEPS} empty stages take, against {name}?",
        unit="s",
        better="lower",
        arms={"A": label, "B": "raykeel run"},
        pairs=pairs,
        margin=0.05,
        limit=1.0,
        gate=gate,
        details={"steps": STEPS, name: alternatives.PINNED[name], **medians(pairs)},
    )


def _ours(directory: Path, verb: str) -> Arm:
    """Another seed each time: nothing is reused. One state directory, as one project has."""
    conf, log = directory / "conf", directory / f"{verb}.log"
    links.pipeline(conf, f"{verb}s", [verb] * STEPS)
    seeds = iter(range(1, 1_000))

    def once() -> float:
        words = links.command(conf, directory / "state", f"{verb}s", f"seed={next(seeds)}")
        return machine.timed(words, log, machine.clean_environment()).wall_s

    return Arm("ours", once, log, f"value {STEPS}")


def _cold(bench: Bench, directory: Path, arm: Arm) -> tuple[list[float], list[float]]:
    """(seconds of each run that starts the scribe itself, seconds of each start of a scribe until its store is open)."""
    app = AppConfig(name="links", state=str(directory / "state"))
    runs, starts = [], []
    for _ in range(bench.pairs(6)):
        desk.end(app.state_root)
        if not desk.running(app.state_root):
            runs.append(arm.run())
        desk.end(app.state_root)
        began = time.perf_counter()
        Dictation(Desk.of(app), app.name).close()
        starts.append(time.perf_counter() - began)
    desk.end(app.state_root)
    arm.run()  # whoever is measured next finds a scribe, as before
    bench.say(f"cold: {statistics.median(runs):.2f} s, of these {statistics.median(starts):.2f} s until MLflow is open")
    return runs, starts


def _with_ray(bench: Bench, directory: Path, arm: Arm) -> tuple[float, list[float]]:
    """(seconds that Ray's start took, seconds of each run with Ray up)."""
    began = time.perf_counter()
    with machine.local_head(directory / "state"):
        started = time.perf_counter() - began
        bench.say(f"Ray is up after {started:.1f} s")
        arm.run()
        whole = [arm.run() for _ in range(bench.pairs(6))]
        bench.say(f"with Ray: {statistics.median(whole):.2f} s")
    return started, whole


def _metaflow(bench: Bench, directory: Path) -> Arm:
    python = str(alternatives.installed("metaflow", bench.say) / "python")
    place, log = directory / "metaflow", directory / "metaflow.log"
    place.mkdir()
    (place / "flow.py").write_text(metaflow_source())
    environ = alternatives.environment(directory / "home")

    def once() -> float:
        return machine.timed([python, "flow.py", "run"], log, environ, cwd=place).wall_s

    return Arm("metaflow run", once, log, f"value {STEPS}")


def _dagster(bench: Bench, directory: Path) -> Arm:
    dagster = str(alternatives.installed("dagster", bench.say) / "dagster")
    place, log = directory / "dagster", directory / "dagster.log"
    place.mkdir()
    (place / "chain.py").write_text(dagster_source())
    (place / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    environ = alternatives.environment(directory / "home", DAGSTER_HOME=str(place))

    def once() -> float:
        words = [dagster, "job", "execute", "-f", "chain.py", "-j", "chain"]
        return machine.timed(words, log, environ, cwd=place).wall_s

    return Arm("dagster job execute", once, log, f"value {STEPS}")
