"""What a lost worker costs: one of two is killed in the middle of training, under Ray Train and under torchrun's own agent, which
both start the workers again from the newest checkpoint.

Seconds from the kill to the end of the first step that is new, and the steps that had to be taken a second time. Apart from
`train_launcher`, whose runs nothing happens to.
"""

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine, train_launcher, workload
from benchmarks.harness import Bench, Check, Pair, Result, medians
from benchmarks.workload import THREADS, WORKERS
from stages.launching.torchrun import OWN_STORE
from stages.training.follow import METRICS

RUN_TIMEOUT_S = 180.0
KILL_AT, STEPS, CHECKPOINT_EVERY, RESTARTS = 21, 32, 8, 2
LONGER_S = 10.0
"""More than torchrun's agent takes, at most."""


@dataclass(frozen=True)
class Recovery:
    """One run with one kill, as its lines tell it."""

    seconds: float
    """From the kill to the end of the first step that had not been there before."""
    steps_lost: int
    """Steps that had been taken, and were taken again."""
    restarts: int
    losses: dict[int, str]
    """Step -> its loss as written, where it was taken last: equal text is equal bits."""
    agrees: bool
    """Each step that was taken again had the same loss again."""


def run(bench: Bench) -> list[Result]:
    runs: dict[str, list[Recovery]] = {"torchrun": [], "ray": []}
    with machine.scratch() as directory:
        data, state = directory / "data", directory / "state"
        # Without its own store torchrun's restart fails one time in three: nothing to compare with.
        environ = machine.clean_environment(OMP_NUM_THREADS=str(THREADS), **OWN_STORE)
        machine.run(machine.python("-m", "benchmarks.workload", str(data)), directory / "data.log", environ, 120)
        bench.say("data made")

        def measure(kind: str) -> float:
            work = directory / f"{len(runs['torchrun']) + len(runs['ray']):03d}-{kind}"
            work.mkdir()
            how = workload.words(checkpoint_every=CHECKPOINT_EVERY, max_failures=RESTARTS)
            if kind == "ray":
                command = train_launcher.ray(data, work, STEPS, state, *how)
            else:
                command = train_launcher.torchrun(data, work, STEPS, *how, restarts=RESTARTS)
            killed = _run_and_kill(command, work, environ)
            runs[kind].append(read((work / METRICS).read_text().splitlines(), killed))
            return runs[kind][-1].seconds

        with machine.local_head(state):
            bench.say("head up; torchrun --max-restarts 2 (A) against Ray Train (B)")
            pairs = bench.alternate(bench.pairs(6, quick=1), lambda: measure("torchrun"), lambda: measure("ray"))
    return _results(bench, pairs, runs)


def _results(bench: Bench, pairs: Sequence[Pair], runs: dict[str, list[Recovery]]) -> list[Result]:
    longer = [pair.b - pair.a for pair in pairs]
    gate = _gate(runs)
    details = {"steps": STEPS, "killed_at_step": KILL_AT, "checkpoint_every": CHECKPOINT_EVERY, "workers": WORKERS}
    return [
        bench.compare(
            "train_recovery_seconds",
            "How long from the death of one of two workers to the end of the first new step?",
            unit="s",
            better="lower",
            arms={"A": "torchrun --max-restarts 2", "B": "Ray Train"},
            pairs=pairs,
            margin=0.1,
            gate=gate,
            details=details | medians(pairs),
        ),
        bench.value(
            "train_recovery_longer_seconds",
            "How much longer than torchrun's agent does Ray Train take for that?",
            unit="s",
            values=longer,
            limit=LONGER_S,
            gate=gate,
            details=details,
        ),
        bench.value(
            "train_recovery_steps_lost",
            "How many steps are taken again under Ray Train, with a checkpoint every eight?",
            unit="steps",
            values=[run.steps_lost for run in runs["ray"]],
            limit=CHECKPOINT_EVERY,
            needs_quiet=False,
            gate=gate,
            details=details | {"torchrun": [run.steps_lost for run in runs["torchrun"]]},
        ),
    ]


def _run_and_kill(command: list[str], work: Path, environ: dict[str, str]) -> float:
    """Kill rank 1 when step KILL_AT is done, and let the run end; when (Unix time)."""
    deadline = time.monotonic() + RUN_TIMEOUT_S
    killed = None
    with machine.started(command, work / "log", environ) as process:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{command[1:4]} took more than {RUN_TIMEOUT_S:.0f} s\n{machine.tail(work / 'log')}")
            if killed is None and _steps_done(work / METRICS) >= KILL_AT:
                killed = time.time()
                os.kill(json.loads((work / "workers" / "rank-1.json").read_text())["pid"], signal.SIGKILL)
            time.sleep(0.005 if killed is None else 0.2)
        if process.returncode or killed is None:
            raise RuntimeError(f"{command[1:4]} ended with {process.returncode}\n{machine.tail(work / 'log')}")
    return killed


def _steps_done(metrics: Path) -> int:
    """The last step of which a whole line is there."""
    if not metrics.exists():
        return 0
    whole = metrics.read_text().split("\n")[:-1]
    return max((json.loads(line).get("step", 0) for line in whole), default=0)


def read(lines: Sequence[str], killed: float) -> Recovery:
    """What the lines of a run tell that lost a worker at `killed`."""
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    again = [index for index, line in enumerate(events) if line.get("event", "").startswith("resumed")]
    cut = again[0] if again else len(events)
    before, after = ([line for line in part if "step" in line] for part in (events[:cut], events[cut:]))
    reached = max(line["step"] for line in before)
    new = [line for line in after if line["step"] > reached]
    taken = {line["step"]: repr(line["loss"]) for line in before}
    return Recovery(
        seconds=new[0]["at"] - killed if new else float("nan"),
        steps_lost=reached - (after[0]["step"] - 1) if after else 0,
        restarts=len(again),
        losses=taken | {line["step"]: repr(line["loss"]) for line in after},
        agrees=all(taken.get(line["step"], repr(line["loss"])) == repr(line["loss"]) for line in after),
    )


def _gate(runs: dict[str, list[Recovery]]) -> list[Check]:
    every = [run for kind in runs.values() for run in kind]
    losses = every[0].losses
    return [
        Check(
            "each run was resumed once",
            all(run.restarts == 1 for run in every),
            ", ".join(str(run.restarts) for run in every),
        ),
        Check(
            "every run has the same loss in every step, bit for bit, taken once or twice",
            all(run.agrees and run.losses == losses for run in every) and list(losses) == list(range(1, STEPS + 1)),
            f"{len(every)} runs of {len(losses)} steps, last loss {list(losses.values())[-1]}",
        ),
    ]
