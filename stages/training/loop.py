"""The training loop: one process of one world, whoever launched it. Apart from `train.py`, because it imports neither ray
nor torchrun, so that the same body runs under either and can be compared, debugged and tested as a function.

Each rank computes which rows a step has, takes its share, and divides its summed loss by the weight of the whole step
(supervised tokens, or pairs). Everything random is a function of seed and step, so that a checkpoint needs no random state.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from stages.contract import StageError
from stages.training import adapters, checkpoints, optimizer
from stages.training.config import Job, Precision
from stages.training.export import export
from stages.training.follow import METRICS, Writer
from stages.training.loss import Batch
from stages.training.objective import Int64, objective_of, split
from stages.training.world import World, environment, joined, repeatable


def run(job: Job, on_line: Callable[[], None] = lambda: None) -> None:
    """Train, resuming from the newest whole checkpoint under `job.work`, and export into `job.work / "export"`.

    Rank 0 appends to `metrics.jsonl`; `on_line` is called after each line (a launcher in this process reports from it).
    StageError (on all ranks) when the data set does not fit the model or too many steps are not finite.
    """
    with joined() as world, repeatable(job.threads):
        _run(job, world, on_line)


def _run(job: Job, world: World, on_line: Callable[[], None]) -> None:
    # A function of its own, so that the model and its reducer are gone before the process group is taken down.
    training = Training(job, world, on_line)
    try:
        for step in range(training.resume(), training.sampler.steps):
            training.step(step)
        if world.rank == 0:
            training.export()
        world.wait()
    finally:
        if training.writer:
            training.writer.close()


class Training:
    """The state of one rank: model, optimizer, counters."""

    def __init__(self, job: Job, world: World, on_line: Callable[[], None]) -> None:
        self.job, self.world, self.on_line = job, world, on_line
        job.work.mkdir(parents=True, exist_ok=True)
        self.writer = Writer(job.work / METRICS) if world.rank == 0 else None
        self.objective = objective_of(job, world)
        self.model, self.sampler = self.objective.model, self.objective.sampler
        self.optimizer = optimizer.made(self.model, job.recipe.optimizer)
        self.tokens = self.skipped = 0
        self.last: dict[str, Any] = {}
        self.clock = time.monotonic()

    def resume(self) -> int:
        """Load the newest whole checkpoint, which rank 0 picks for all, and return the step to go on with."""
        _record_environment(self.job, self.world)
        found = None
        if self.world.rank == 0:
            found = checkpoints.newest(self.job.work / "checkpoints", lambda text: self.line(event=text))
        found = self.world.share(found)
        step = 0
        if found is not None:
            state = checkpoints.load(found)
            step = state["step"]
            if state["sampler"] != self.sampler.state(step):
                raise StageError(f"{found}: was written by another recipe; remove {self.job.work} and run again")
            adapters.restore(self.model, state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.tokens, self.skipped, self.last = state["tokens"], state["skipped"], state["last"]
            self.line(event=f"resumed from step {step}")
        self.model.train()
        self.ddp: Any = self.objective.module
        if self.world.size > 1:
            self.ddp = DistributedDataParallel(self.ddp, forward_sync_buffers=False, gradient_as_bucket_view=True)
            # DDP regroups its gradient buckets after its first backward pass. That pass is taken here, on nothing, so
            # that a resumed run sums gradients in the same groups as the undisturbed one.
            split(self.ddp(**self.objective.weightless()))[0].backward()
            self.optimizer.zero_grad(set_to_none=False)
        self.clock = time.monotonic()
        return step

    def step(self, step: int) -> None:
        """One optimizer step: forward and backward over this rank's share, clip, update, report, perhaps checkpoint."""
        recipe, steps = self.job.recipe, self.sampler.steps
        torch.manual_seed(int(np.random.SeedSequence([self.job.seed, step, self.world.rank]).generate_state(1)[0]))
        rows = self.sampler.step(step)
        weight, tokens = self.objective.weight(rows), self.objective.tokens(rows)
        sums = {name: self.world.sum(value) / max(weight, 1) for name, value in self._backward(rows, weight).items()}
        loss = sums["loss"]
        norm = optimizer.clip(self.model, recipe.max_grad_norm)
        rate = optimizer.learning_rate(step, steps, recipe.learning_rate, recipe.schedule)
        # Loss and gradients are sums over all ranks by now, so every rank decides the same without asking.
        if weight and math.isfinite(loss) and math.isfinite(norm):
            optimizer.take(self.optimizer, rate)
            self.last["train_loss"] = loss
        else:
            self.skipped += 1
        self.optimizer.zero_grad(set_to_none=self.world.size == 1)
        self.tokens += tokens
        self._report(step + 1, tokens, **sums, learning_rate=rate, grad_norm=norm)
        if self.skipped > recipe.max_nonfinite_steps:
            raise StageError(
                f"step {step + 1}: loss {loss}, gradient norm {norm}; {self.skipped} steps were not finite or had no "
                f"supervised token, max_nonfinite_steps is {recipe.max_nonfinite_steps}; lower learning_rate (now "
                f"{recipe.learning_rate:g}) or look at the data set"
            )
        if (step + 1) % self.job.checkpoint_every == 0 or step + 1 == steps:
            self._checkpoint(step + 1)

    def _backward(self, rows: Int64, weight: int) -> dict[str, float]:
        """Gradients of the step's mean loss; returns what this rank adds to the sums of the step, `loss` among them."""
        # DDP averages over ranks, so the factor world.size turns its mean of sums into the sum that was wanted.
        scale = self.world.size / max(weight, 1)
        sums: dict[str, float] = {}
        batches = list(self._batches(rows[self.world.rank :: self.world.size]))
        for index, micro in enumerate(batches):
            accumulate = self.world.size > 1 and index < len(batches) - 1
            with self.ddp.no_sync() if accumulate else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=self.job.recipe.precision is Precision.bfloat16):
                    loss, shown = split(self.ddp(**micro))
                (loss * scale).backward()
            for name, value in ({"loss": loss.detach()} | shown).items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def _batches(self, rows: Int64) -> Iterator[Batch]:
        size = self.job.micro_batch_rows
        for first in range(0, len(rows), size):
            yield self.objective.batch(rows[first : first + size])
        if not len(rows):
            yield self.objective.weightless()

    def _report(self, step: int, tokens: int, **values: float) -> None:
        now = time.monotonic()
        speed, self.clock = tokens / (now - self.clock), now
        values |= {"tokens": self.tokens, "tokens_per_second": speed, "skipped": self.skipped}
        every = self.job.recipe.validate_every
        if step == self.sampler.steps or (every and step % every == 0):
            found = self.objective.validate(self.world)
            values |= found
            self.last |= found
            self.clock = time.monotonic()
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self.line(step=step, steps=self.sampler.steps, at=time.time(), **finite)

    def line(self, **values: Any) -> None:
        """Append a line, on rank 0."""
        if self.writer:
            self.writer.write(**values)
            self.on_line()

    def _checkpoint(self, step: int) -> None:
        if self.world.rank == 0:
            state = {
                "step": step,
                "sampler": self.sampler.state(step),
                "model": adapters.state(self.model),
                "optimizer": self.optimizer.state_dict(),
                "tokens": self.tokens,
                "skipped": self.skipped,
                "last": self.last,
            }
            checkpoints.save(self.job.work / "checkpoints", step, state)
            self.clock = time.monotonic()

    def export(self) -> None:
        """Write the finished model where the launcher picks it up."""
        summary = {
            "steps": self.sampler.steps,
            "tokens": self.tokens,
            "skipped_steps": self.skipped,
            "train_loss": self.last.get("train_loss"),
            "validation_loss": self.last.get("validation_loss"),
        }
        stops, probe = self.objective.export_facts()
        export(self.model, self.job, summary | self.objective.summary(), stop_token_ids=stops, probe=probe)


def _record_environment(job: Job, world: World) -> None:
    directory = job.work / "workers"
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(environment(world), indent=2, sort_keys=True)
    (directory / f"rank-{world.rank}.json").write_text(text + "\n", "utf-8")
