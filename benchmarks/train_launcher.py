"""What Ray Train costs a training step: the loop of `stages/training/loop.py` under the train stage against the same loop
under torchrun. Whole processes are restarted for every measurement; speeds come from the loop's own lines.

Four questions: steady tokens/s with Ray's head up in both arms (what the framework adds to a step), with two workers and with
one; the same with torchrun on a machine without Ray (what its daemons take besides); seconds from spawn to the first finished step.
"""

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import machine, workload
from benchmarks.harness import Bench, Check, Pair, Result
from benchmarks.workload import THREADS, WARMUP_STEPS, WORKERS

RUN_TIMEOUT_S = 150.0
STEPS = {1: 30, 2: 40}
"""Steps that speed is taken from, by workers: one worker takes twice the time for each."""
LAUNCHERS_OWN = (
    "MASTER_", "RANK", "LOCAL_", "NODE_RANK", "WORLD_SIZE", "GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
"""Variables in which launchers differ by nature: who is who, whose GPUs are whose, and NCCL's settings, which gloo does not read."""


@dataclass(frozen=True)
class Run:
    """One training run as its files tell it."""

    tokens_per_second: float
    """Over all steps after the warm-up."""
    first_step_s: float
    """From the launcher's spawn to the end of the first step."""
    losses: list[str]
    """Of each step, as written: equal text is equal bits."""
    workers: list[dict[str, Any]]


class Launchers:
    """Starts the same job one way and another, again and again, and keeps what each run was."""

    def __init__(self, directory: Path, quick: bool) -> None:
        self.directory, self.quick = directory, quick
        self.data, self.state = directory / "data", directory / "state"
        self.environ = machine.clean_environment(OMP_NUM_THREADS=str(THREADS))
        self.runs: dict[tuple[str, int], list[Run]] = defaultdict(list)
        """(kind, workers) -> its runs, in order."""
        self.count = 0

    def steps(self, workers: int) -> int:
        return 4 if self.quick else STEPS[workers]

    def make_data(self) -> None:
        machine.run(
            machine.python("-m", "benchmarks.workload", str(self.data)), self.directory / "data.log", self.environ, 120
        )

    def measure(self, kind: str, workers: int = WORKERS) -> float:
        """One run; its tokens a second."""
        self.count += 1
        work = self.directory / f"{self.count:03d}-{kind}"
        work.mkdir()
        steps = WARMUP_STEPS + self.steps(workers)
        how = workload.words(workers=workers)
        command = (
            ray(self.data, work, steps, self.state, *how) if kind == "ray" else torchrun(self.data, work, steps, *how)
        )
        spawned = time.time()
        machine.run(command, work / "log", self.environ, RUN_TIMEOUT_S)
        self.runs[kind, workers].append(_read(work, spawned))
        return self.runs[kind, workers][-1].tokens_per_second

    def warm(self, workers: int) -> None:
        """Page cache and compiled bytecode are warm for both launchers from here on."""
        self.measure("torchrun", workers)
        self.runs["torchrun", workers].clear()

    def first_steps(self, pairs: list[Pair]) -> list[Pair]:
        """The same pairs by their time to the first step."""
        both = zip(pairs, self.runs["torchrun", WORKERS], self.runs["ray", WORKERS], strict=True)
        return [Pair(p.order, a.first_step_s, b.first_step_s) for p, a, b in both]

    def of(self, workers: int) -> list[Run]:
        return [run for (_, size), runs in self.runs.items() if size == workers for run in runs]


def run(bench: Bench) -> list[Result]:
    with machine.scratch() as directory:
        arms = Launchers(directory, bench.quick)
        arms.make_data()
        bench.say("data made")
        with machine.local_head(arms.state):
            bench.say("head up, nothing served; torchrun (A) against Ray Train (B), two workers")
            arms.warm(2)
            pairs = bench.alternate(bench.pairs(8), lambda: arms.measure("torchrun"), lambda: arms.measure("ray"))
            fixed = arms.first_steps(pairs)
            bench.say("the same with one worker")
            arms.warm(1)
            alone = bench.alternate(
                bench.pairs(6, quick=1), lambda: arms.measure("torchrun", 1), lambda: arms.measure("ray", 1)
            )
        bench.say("torchrun without any Ray process (A) against Ray Train (B), two workers")

        def measure_under_head() -> float:
            with machine.local_head(arms.state):
                return arms.measure("ray")

        charged = bench.alternate(bench.pairs(2, quick=1), lambda: arms.measure("alone"), measure_under_head)
    return [
        _speed(bench, arms, "train_tokens_per_second", pairs, limit=0.97),
        _speed(bench, arms, "train_tokens_per_second_one_worker", alone, workers=1, limit=0.99),
        bench.compare(
            "train_tokens_per_second_daemons_charged",
            "The same against torchrun on a machine on which no Ray process runs",
            unit="tokens/s",
            better="higher",
            arms={"A": "torchrun, no Ray on the machine", "B": "Ray Train and its daemons"},
            pairs=charged,
            floor_pairs=_floor(pairs),
            margin=0.03,
            gate=_gate(arms, WORKERS),
            details=_details(arms, WORKERS),
        ),
        bench.compare(
            "train_seconds_to_first_step",
            "How long from the launcher's spawn to the end of the first step, on a running head?",
            unit="s",
            better="lower",
            arms={"A": "torchrun", "B": "Ray Train"},
            pairs=fixed,
            margin=0.1,
            gate=_gate(arms, WORKERS),
            details={"difference_s": sum(p.b - p.a for p in fixed) / len(fixed)},
        ),
    ]


def _speed(
    bench: Bench, arms: Launchers, name: str, pairs: list[Pair], *, limit: float, workers: int = WORKERS
) -> Result:
    return bench.compare(
        name,
        f"Does Ray Train slow a training step down ({workers} worker{'s' * (workers > 1)}), head up and nothing served in both arms?",
        unit="tokens/s",
        better="higher",
        arms={"A": "torchrun", "B": "Ray Train"},
        pairs=pairs,
        floor_pairs=_floor(pairs),
        margin=0.03,
        limit=limit,
        gate=_gate(arms, workers),
        details=_details(arms, workers),
    )


def _floor(pairs: list[Pair]) -> list[Pair]:
    """What the same harness finds between equal arms: runs of A two by two, each with one of B's between them at most."""
    found = [pair.a for pair in pairs]
    return [Pair("AA", a, b) for a, b in list(pairwise(found))[::2]]


def _gate(arms: Launchers, workers: int) -> list[Check]:
    return [_same_losses(arms.of(workers)), _same_environment(arms.of(workers))]


def _details(arms: Launchers, workers: int) -> dict[str, int]:
    return {"steps": arms.steps(workers), "warmup_steps": WARMUP_STEPS, "workers": workers, "threads": THREADS}


def torchrun(data: Path, work: Path, steps: int, *how: str, restarts: int = 0) -> list[str]:
    """A command line of torchrun for the job; `how` as `workload.words`."""
    size = workload.how_of(list(how)).get("workers", WORKERS)
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={size}", f"--max-restarts={restarts}"]
    if restarts:  # what torchrun's documentation asks for where workers are replaced
        launcher += ["--standalone", "--local-addr=127.0.0.1"]
    else:
        launcher += ["--master-addr=127.0.0.1", f"--master-port={machine.free_port()}"]
    return machine.python(*launcher, "-m", "benchmarks.train_torchrun", str(data), str(work), str(steps), *how)


def ray(data: Path, work: Path, steps: int, state: Path, *how: str) -> list[str]:
    """The same through the train stage, on the running head of `state`."""
    return machine.python("-m", "benchmarks.train_ray", str(data), str(work), str(steps), str(state), *how)


def _read(work: Path, spawned: float) -> Run:
    lines = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    seconds = tokens = 0.0
    for before, line in zip(steps[WARMUP_STEPS - 1 :], steps[WARMUP_STEPS:], strict=False):
        supervised = line["tokens"] - before["tokens"]
        tokens += supervised
        seconds += supervised / line["tokens_per_second"]
    return Run(
        tokens_per_second=tokens / seconds,
        first_step_s=steps[0]["at"] - spawned,
        losses=[repr(line["loss"]) for line in steps],
        workers=[json.loads(path.read_text()) for path in sorted((work / "workers").glob("rank-*.json"))],
    )


def _same_losses(runs: list[Run]) -> Check:
    every = [run.losses for run in runs]
    return Check(
        "every run has the same loss in every step, bit for bit",
        all(losses == every[0] for losses in every),
        f"{len(every)} runs of {len(every[0])} steps, last loss {every[0][-1]}",
    )


def _same_environment(runs: list[Run]) -> Check:
    """Threads, cores, backend (which one worker alone has no use for), and all variables that touch arithmetic or speed, in
    every worker of every run."""

    def shown(worker: dict[str, Any]) -> dict[str, Any]:
        names = ["rank", "world_size", "torch", "torch_threads", "torch_interop_threads", "cpus_allowed"]
        names += ["backend"] * (worker["world_size"] > 1)
        variables = {k: v for k, v in worker["variables"].items() if not k.startswith(LAUNCHERS_OWN)}
        return {name: worker[name] for name in names} | variables

    every = [[shown(worker) for worker in run.workers] for run in runs]
    different = sorted(
        {k for one in every for w, first in zip(one, every[0], strict=True) for k in w.keys() | first.keys()
         if w.get(k) != first.get(k)}
    )  # fmt: skip
    found = f"{every[0][0]['torch_threads']} thread, {every[0][0].get('backend', 'alone')}, {every[0][0]['cpus_allowed']} cores"
    return Check("all workers have the same environment", not different, ", ".join(different) or found)
