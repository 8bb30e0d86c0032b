"""Tokens a second of fine-tuning on chats: our loop, packed and unpacked, against TRL's SFTTrainer, padded and packed, on the same
chats, weights and settings (what they are stands in `chats.py` and `train_with_trl.py`). And our loop with one worker against two.

Each measurement is a process of its own. A token counts when it is one of a chat, prompt included; padding does not. Speed is that
of the steps after the warm-up, by the clock between the ends of steps, so that all that a step brings with it is in it. All arms of a
round run one after the other, in turned order from round to round, and are compared within the round.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import alternatives, chats, machine
from benchmarks.harness import Bench, Check, Pair, Result, medians

TIMEOUT_S = 240.0
CHATS, QUICK_CHATS = 1_500, 400
WARMUP_STEPS = 3
ARMS = {
    "trl_padded": "TRL SFTTrainer, padded",
    "trl_packed": "TRL SFTTrainer, packing=True",
    "alone": "raykeel, packing=none",
    "packed": "raykeel, packing=best_fit_decreasing",
}
STEPS = {"trl_padded": 24, "trl_packed": 6, "alone": 24, "packed": 8}
"""Timed ones: about as many seconds in each arm. A packed step has some four times as many tokens."""
COMPARED = {
    "train_packed_trl_padded": ("trl_padded", "packed", 1.5),
    "train_unpacked_trl_padded": ("trl_padded", "alone", 1.0),
    "train_packed_trl_packed": ("trl_packed", "packed", None),
}
"""Name of the result -> (arm A, arm B, least ratio)."""
SAME_LOSSES, LOSS_LIMIT = 10, 1e-4
"""So many first steps are compared, and by so much losses may differ (nats a token): after more of them rounding has grown."""
DATA_WAIT_LIMIT = 2.0
"""Per cent of the step time."""


@dataclass(frozen=True)
class Run:
    """One training run, step by step."""

    at: list[float]
    """When each step ended."""
    tokens: list[int]
    losses: list[float]
    waited: float | None = None
    """Share of its time in which our loop made batches."""

    @property
    def speed(self) -> float:
        """Tokens a second after the warm-up. The last step is left out: with us, its pass over the validation split is in it."""
        return sum(self.tokens[WARMUP_STEPS:-1]) / (self.at[-2] - self.at[WARMUP_STEPS - 1])


def run(bench: Bench) -> list[Result]:
    with machine.scratch() as directory:
        made = directory / "made"
        environ = machine.clean_environment()
        count = str(QUICK_CHATS if bench.quick else CHATS)
        machine.run(machine.python("-m", "benchmarks.chats", str(made), count), directory / "made.log", environ, 300)
        bench.say("chats, rows and model made")
        found: dict[str, list[Run]] = {arm: [] for arm in ARMS}
        for number in range(bench.pairs(4, quick=1)):
            for arm in order(number):
                found[arm].append(once(bench, directory, arm))
            speeds = ", ".join(f"{arm} {found[arm][-1].speed:.0f}" for arm in ARMS)
            bench.say(f"round {number + 1}: tokens/s: {speeds}")
        recomputed = None if bench.quick else once(bench, directory, "trl_recomputed")
        one, two = [], []
        scaling = bench.alternate(
            bench.pairs(4, quick=1),
            lambda: _speed(one, once(bench, directory, "packed", workers=1)),
            lambda: _speed(two, once(bench, directory, "packed", workers=2)),
            "one worker (A) and two (B)",
        )
    details = described(found, recomputed)
    results = [
        bench.compare(
            name,
            f"How many tokens of chats a second: {ARMS[b]} against {ARMS[a]}?",
            unit="tokens/s",
            better="higher",
            arms={"A": ARMS[a], "B": ARMS[b]},
            pairs=(pairs := paired(found[a], found[b])),
            margin=0.05,
            limit=limit,
            gate=[same_tokens(found), same_losses(found)],
            details={**details, **medians(pairs), "trl": alternatives.PINNED["trl"]},
        )
        for name, (a, b, limit) in COMPARED.items()
    ]
    return [*results, _scaling(bench, scaling, one, two), _data_wait(bench, found)]


def order(number: int) -> list[str]:
    """Of a round: to and fro, so that drift favours no arm."""
    return list(ARMS) if number % 2 == 0 else list(ARMS)[::-1]


def paired(a: Sequence[Run], b: Sequence[Run]) -> list[Pair]:
    """Of the same round."""
    both = enumerate(zip(a, b, strict=True))
    return [Pair("AB" if number % 2 == 0 else "BA", one.speed, other.speed) for number, (one, other) in both]


def same_tokens(found: dict[str, list[Run]]) -> Check:
    """The unpacked arms take the same rows: each step has as many tokens with both."""
    ours, theirs = ([one.tokens for one in found[arm]] for arm in ("alone", "trl_padded"))
    return Check(
        "both unpacked arms count the same tokens in every step",
        all(one == ours[0] for one in [*ours, *theirs]),
        f"{sum(ours[0])} and {sum(theirs[0])} tokens in {len(ours[0])} and {len(theirs[0])} steps",
    )


def same_losses(found: dict[str, list[Run]]) -> Check:
    """They compute the same, too."""
    ours, theirs = ([one.losses[:SAME_LOSSES] for one in found[arm]] for arm in ("alone", "trl_padded"))
    apart = max(abs(a - b) for one in [*ours, *theirs] for a, b in zip(one, ours[0], strict=True))
    return Check(
        f"both unpacked arms have the same loss in each of the first {SAME_LOSSES} steps, within {LOSS_LIMIT:g}",
        apart <= LOSS_LIMIT,
        f"{apart:.1e} apart at most, first loss {ours[0][0]:.4f}",
    )


def described(found: dict[str, list[Run]], recomputed: Run | None) -> dict[str, Any]:
    """What the numbers are of."""
    facts: dict[str, Any] = {
        "rows_per_step": chats.ROWS,
        "longest_row": chats.LENGTH,
        "model": chats.SHAPE | {"vocab_size": chats.VOCABULARY},
        "threads": chats.THREADS,
        "timed_steps": {arm: len(runs[0].at) - WARMUP_STEPS - 1 for arm, runs in found.items()},
        "tokens_per_step": {arm: round(sum(runs[0].tokens) / len(runs[0].tokens), 1) for arm, runs in found.items()},
        "data_wait_percent": {arm: [round(100 * one.waited, 3) for one in found[arm]] for arm in ("alone", "packed")},
    }
    if recomputed is not None:
        facts["trl_with_its_gradient_checkpointing"] = round(recomputed.speed, 1)
    return facts


def once(bench: Bench, directory: Path, arm: str, workers: int = 0) -> Run:
    """One run in an empty directory, which is gone afterwards. `workers`: so many under torchrun, of one thread each."""
    work, log = directory / "work", directory / f"{arm}.log"
    work.mkdir()
    timed = STEPS["trl_padded" if arm == "trl_recomputed" else arm]
    steps = WARMUP_STEPS + (SAME_LOSSES - WARMUP_STEPS if bench.quick else timed) + 1
    if arm.startswith("trl_"):
        made = _trl(bench, directory, arm.removeprefix("trl_"), work, log, steps)
    else:
        made = _ours(directory, arm, work, log, steps, workers)
    shutil.rmtree(work)
    return made


def _trl(bench: Bench, directory: Path, arm: str, work: Path, log: Path, steps: int) -> Run:
    python = str(alternatives.installed("trl", bench.say) / "python")
    program = str(machine.ROOT / "benchmarks" / "train_with_trl.py")
    places = [str(directory / "made" / name) for name in ("base", "chats.jsonl")]
    environ = alternatives.environment(
        directory / "home", PYTHONPATH=str(machine.ROOT), HF_HUB_OFFLINE="1", OMP_NUM_THREADS=str(chats.THREADS)
    )
    machine.run([python, program, *places, str(work), str(steps), arm], log, environ, TIMEOUT_S)
    found = json.loads(next(line for line in reversed(log.read_text().splitlines()) if line[:2] == '{"'))
    return Run(**found)


def _ours(directory: Path, arm: str, work: Path, log: Path, steps: int, workers: int) -> Run:
    threads = 1 if workers else chats.THREADS
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={workers}", "--master-addr=127.0.0.1"]
    launcher += [f"--master-port={machine.free_port()}"]
    dataset = directory / "made" / arm
    places = [str(dataset), str(directory / "made" / "base"), str(work)]
    words = [*(launcher if workers else []), "-m", "benchmarks.train_chats", *places, str(steps), str(threads)]
    machine.run(machine.python(*words), log, machine.clean_environment(OMP_NUM_THREADS=str(threads)), TIMEOUT_S)
    lines = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    of_steps = [line for line in lines if "step" in line]
    return Run(
        at=[line["at"] for line in of_steps],
        tokens=chats.tokens_of_steps(dataset, steps),
        losses=[line["loss"] for line in of_steps],
        waited=next(line["summary"]["data_wait_share"] for line in lines if "summary" in line),
    )


def _speed(runs: list[Run], made: Run) -> float:
    runs.append(made)
    return made.speed


def _scaling(bench: Bench, pairs: list[Pair], one: list[Run], two: list[Run]) -> Result:
    apart = max(abs(a - b) for run in [*one, *two] for a, b in zip(run.losses, one[0].losses, strict=True))
    return bench.compare(
        "train_scaling",
        "How many tokens of chats a second with two workers against one, one thread each, under torchrun?",
        unit="tokens/s",
        better="higher",
        arms={"A": "1 worker", "B": "2 workers"},
        pairs=pairs,
        margin=0.05,
        gate=[Check(f"the same losses within {LOSS_LIMIT:g}", apart <= LOSS_LIMIT, f"{apart:.1e} apart at most")],
        details={**medians(pairs), "rows_per_step": chats.ROWS, "longest_row": chats.LENGTH, "threads_per_worker": 1},
    )


def _data_wait(bench: Bench, found: dict[str, list[Run]]) -> Result:
    shares = {arm: [100 * one.waited for one in found[arm] if one.waited is not None] for arm in ("alone", "packed")}
    return bench.value(
        "train_data_wait_percent",
        "In what share of a training step does our loop wait for its batch?",
        unit="%",
        values=[share for of_arm in shares.values() for share in of_arm],
        limit=DATA_WAIT_LIMIT,
        details=shares,
    )
