"""What Ray Train costs a training step: the loop of `stages/training/loop.py` under the train stage against the same loop
under torchrun. Whole processes are restarted for every measurement; speeds come from the loop's own lines.

Three questions: steady tokens/s with Ray's head up in both arms (what the framework adds to a step), the same with
torchrun on a machine without Ray (what its daemons take besides), and seconds from spawn to the first finished step.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.harness import Bench, Check, Pair, Result
from benchmarks.workload import THREADS, WARMUP_STEPS, WORKERS

RUN_TIMEOUT_S = 150.0
LAUNCHERS_OWN = (
    "MASTER_", "RANK", "LOCAL_", "NODE_RANK", "WORLD_SIZE", "GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC",
)  # fmt: skip
"""Variables in which launchers differ by nature: who is who, and NCCL's settings, which gloo does not read."""


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


def run(bench: Bench) -> list[Result]:
    steps = WARMUP_STEPS + (4 if bench.quick else 40)
    with machine.scratch() as directory:
        data, state = directory / "data", directory / "state"
        environ = machine.clean_environment(OMP_NUM_THREADS=str(THREADS))
        machine.run(machine.python("-m", "benchmarks.workload", str(data)), directory / "data.log", environ, 120)
        bench.say("data made")
        runs: dict[str, list[Run]] = {"torchrun": [], "ray": [], "alone": []}
        count = 0

        def measure(kind: str) -> float:
            nonlocal count
            count += 1
            work = directory / f"{count:03d}-{kind}"
            work.mkdir()
            command = _ray(data, work, steps, state) if kind == "ray" else _torchrun(data, work, steps)
            spawned = time.time()
            machine.run(command, work / "log", environ, RUN_TIMEOUT_S)
            runs[kind].append(_read(work, spawned))
            return runs[kind][-1].tokens_per_second

        with machine.local_head(state):
            bench.say("head up, nothing served; torchrun (A) against Ray Train (B)")
            measure("torchrun")  # page cache and compiled bytecode are warm for both from here on
            runs["torchrun"].clear()
            pairs = bench.alternate(bench.pairs(6), lambda: measure("torchrun"), lambda: measure("ray"))
            fixed = _first_steps(pairs, runs["torchrun"], runs["ray"])
            floor = bench.alternate(
                bench.pairs(3, quick=1), lambda: measure("torchrun"), lambda: measure("torchrun"), "A/A pair"
            )
        bench.say("torchrun without any Ray process (A) against Ray Train (B)")

        def measure_under_head() -> float:
            with machine.local_head(state):
                return measure("ray")

        charged = bench.alternate(bench.pairs(3, quick=1), lambda: measure("alone"), measure_under_head)
    gate = [_same_losses(runs), _same_environment(runs)]
    arms = {"A": "torchrun", "B": "Ray Train"}
    details = {"steps": steps - WARMUP_STEPS, "warmup_steps": WARMUP_STEPS, "workers": WORKERS, "threads": THREADS}
    return [
        bench.compare(
            "train_tokens_per_second",
            "Does Ray Train slow a training step down, head up and nothing served in both arms?",
            unit="tokens/s",
            better="higher",
            arms=arms,
            pairs=pairs,
            floor_pairs=floor,
            margin=0.03,
            limit=0.97,
            gate=gate,
            details=details,
        ),
        bench.compare(
            "train_tokens_per_second_daemons_charged",
            "The same against torchrun on a machine on which no Ray process runs",
            unit="tokens/s",
            better="higher",
            arms={"A": "torchrun, no Ray on the machine", "B": "Ray Train and its daemons"},
            pairs=charged,
            floor_pairs=floor,
            margin=0.03,
            gate=gate,
            details=details,
        ),
        bench.compare(
            "train_seconds_to_first_step",
            "How long from the launcher's spawn to the end of the first step, on a running head?",
            unit="s",
            better="lower",
            arms=arms,
            pairs=fixed,
            margin=0.1,
            gate=gate,
            details={"difference_s": sum(p.b - p.a for p in fixed) / len(fixed)},
        ),
    ]


def _torchrun(data: Path, work: Path, steps: int) -> list[str]:
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={WORKERS}", "--master-addr=127.0.0.1"]
    port = f"--master-port={machine.free_port()}"
    return machine.python(*launcher, port, "-m", "benchmarks.train_torchrun", str(data), str(work), str(steps))


def _ray(data: Path, work: Path, steps: int, state: Path) -> list[str]:
    return machine.python("-m", "benchmarks.train_ray", str(data), str(work), str(steps), str(state))


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


def _first_steps(pairs: list[Pair], torchrun: list[Run], ray: list[Run]) -> list[Pair]:
    """The same pairs by their time to the first step; both lists are in the order of the pairs."""
    return [Pair(p.order, a.first_step_s, b.first_step_s) for p, a, b in zip(pairs, torchrun, ray, strict=False)]


def _same_losses(runs: dict[str, list[Run]]) -> Check:
    every = [run.losses for kind in runs.values() for run in kind]
    return Check(
        "every run has the same loss in every step, bit for bit",
        all(losses == every[0] for losses in every),
        f"{len(every)} runs of {len(every[0])} steps, last loss {every[0][-1]}",
    )


def _same_environment(runs: dict[str, list[Run]]) -> Check:
    """Threads, cores, backend, and all variables that touch arithmetic or speed, in every worker of every run."""

    def shown(worker: dict[str, Any]) -> dict[str, Any]:
        names = ("rank", "world_size", "torch", "torch_threads", "torch_interop_threads", "cpus_allowed", "backend")
        variables = {k: v for k, v in worker["variables"].items() if not k.startswith(LAUNCHERS_OWN)}
        return {name: worker[name] for name in names} | variables

    every = [[shown(worker) for worker in run.workers] for kind in runs.values() for run in kind]
    different = sorted(
        {k for one in every for w, first in zip(one, every[0], strict=True) for k in w.keys() | first.keys()
         if w.get(k) != first.get(k)}
    )  # fmt: skip
    found = f"{every[0][0]['torch_threads']} thread, {every[0][0]['backend']}, {every[0][0]['cpus_allowed']} cores"
    return Check("all workers have the same environment", not different, ", ".join(different) or found)
