"""The training loop: one process of one world, whoever launched it. Apart from `train.py`, because it imports neither ray
nor torchrun, so that the same body runs under either and can be compared, debugged and tested as a function.

Each rank computes which rows a step has, takes its share, and divides its summed loss by the weight of the whole step
(supervised tokens, or pairs). Everything random is a function of seed and step, so that a checkpoint needs no random state.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from stages.contract import StageError
from stages.training import adapters, checkpoints, device, optimizer, probes, recompute, sharding
from stages.training.config import Job, Weights
from stages.training.export import export
from stages.training.follow import METRICS, Writer
from stages.training.forecast import Forecast
from stages.training.host import Host
from stages.training.loss import Batch, longest_first, on
from stages.training.meter import Meter
from stages.training.objective import Int64, objective_of, split
from stages.training.stopping import Best
from stages.training.world import World, environment, joined, repeatable


def run(job: Job, on_line: Callable[[], None] = lambda: None) -> None:
    """Train, resuming from the newest whole checkpoint under `job.work`, and export into `job.work / "export"`.

    Rank 0 appends to `metrics.jsonl`; `on_line` is called after each line (a launcher in this process reports from it).
    StageError (on all ranks) when the data set does not fit the model or too many steps are not finite.
    """
    with joined(job.collective_timeout_s) as world, repeatable(job.threads):
        _run(job, world, on_line)


def _run(job: Job, world: World, on_line: Callable[[], None]) -> None:
    # A function of its own, so that the model and its reducer are gone before the process group is taken down.
    training = Training(job, world, on_line)
    try:
        for step in range(training.resume(), training.sampler.steps):
            if training.stopped:
                break
            training.step(step)
        training.summarise()
        training.take_weights()
        with world.waiting():
            if world.rank == 0:
                training.export()
    finally:
        if training.writer:
            training.writer.close()


class Training:
    """The state of one rank: model, optimizer, counters."""

    def __init__(self, job: Job, world: World, on_line: Callable[[], None]) -> None:
        self.job, self.world, self.on_line = job, world, on_line
        job.work.mkdir(parents=True, exist_ok=True)
        self.writer = Writer(job.work / METRICS) if world.rank == 0 else None
        device.require(job.recipe.precision, world.device)
        self.meter, self.host = Meter(world.device), Host(job.work, world.device)
        self.objective = objective_of(job, world)
        self.model, self.sampler = self.objective.model, self.objective.sampler
        if job.gradient_checkpointing:
            recompute.enable(self.model)
        self.sharded = job.sharded and world.size > 1
        if self.sharded:  # before it goes to a device, which need not have room for the whole
            sharding.require(job.recipe)
            sharding.split(self.model, world)
        self.objective.module.to(world.device)
        self.optimizer = optimizer.made(self.model, job.recipe.optimizer)
        self.forecast = Forecast(job, self.objective, world)
        self.forecast.require_room()
        probes.require_something_to_learn(self.objective.weight(np.arange(self.sampler.rows)))
        self.done = self.tokens = self.skipped = 0
        self.best, self.stopped = Best(), False
        self.last: dict[str, Any] = {}

    def resume(self) -> int:
        """Load the newest whole checkpoint, which rank 0 picks for all, and return the step to go on with."""
        _record_environment(self.job, self.world)
        if warning := device.untried(self.world.device):
            self.line(event=warning)
        found = None
        if self.world.rank == 0:
            found = checkpoints.newest(self.checkpoints, lambda text: self.line(event=text))
        found = self.world.share(found)
        if found is not None:
            self._restore(found)
            self.line(event=f"resumed from step {self.done}")
            self._find_best()
        else:
            if self.writer and self.writer.found:
                self.line(event="begins again at step 0: the attempt before left no checkpoint")
            self.line(plan=f"{self._plan()}; {self.forecast.text()}")
        self.model.train()
        self.ddp: Any = self.objective.module
        if self.world.size > 1 and not self.sharded:
            self.ddp = DistributedDataParallel(self.ddp, forward_sync_buffers=False, gradient_as_bucket_view=True)
            # DDP regroups its gradient buckets after its first backward pass. That pass is taken here, on nothing, so
            # that a resumed run sums gradients in the same groups as the undisturbed one.
            split(self.ddp(**self.objective.weightless()))[0].backward()
            self.optimizer.zero_grad(set_to_none=False)
        self.meter.restart()
        return self.done

    def _restore(self, checkpoint: Path) -> None:
        state = checkpoints.load(checkpoint)
        self.done = state["step"]
        if state["sampler"] != self.sampler.state(self.done):
            raise StageError(f"{checkpoint}: was written by another recipe; remove {self.job.work} and run again")
        if self.sharded == ("model" in state):
            raise StageError(
                f"{checkpoint}: was written with resources.sharding={'none' if self.sharded else 'full'}; set it so to go on, "
                f"or remove {self.job.work} to begin again"
            )
        if self.sharded:
            sharding.load(checkpoint / sharding.SHARDS, self.model, self.optimizer)
        else:
            adapters.restore(self.model, state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        self.tokens, self.skipped, self.last = state["tokens"], state["skipped"], state["last"]
        self.best = Best(**state["best"])
        self.stopped = self.best.stops(self.job.recipe.early_stopping)

    def _find_best(self) -> None:
        """Forget the best loss so far when the weights that had it cannot be exported any more."""
        step, wanted = self.best.step, self.job.recipe.export is Weights.best and self.best.step not in (0, self.done)
        if wanted and not self.world.share(checkpoints.is_whole(checkpoints.of_step(self.checkpoints, step))):
            self.line(event=f"the best weights (step {step}) are not whole: the best of what follows is exported")
            self.best = Best()

    def step(self, step: int) -> None:
        """One optimizer step: forward and backward over this rank's share, clip, update, report, perhaps checkpoint."""
        recipe, steps = self.job.recipe, self.sampler.steps
        torch.manual_seed(int(np.random.SeedSequence([self.job.seed, step, self.world.rank]).generate_state(1)[0]))
        rows = self.sampler.step(step)
        weight, tokens = self.objective.weight(rows), self.objective.tokens(rows)
        sums = {name: self.world.sum(value) / max(weight, 1) for name, value in self._backward(rows, weight).items()}
        loss = sums["loss"]
        if step == 0 and weight:
            self._look_at(loss)
        norm = optimizer.clip(self.model, recipe.max_grad_norm)
        rate = optimizer.learning_rate(step, steps, recipe.learning_rate, recipe.schedule)
        # Loss and gradients are sums over all ranks by now, so every rank decides the same without asking.
        if weight and math.isfinite(loss) and math.isfinite(norm):
            optimizer.take(self.optimizer, rate)
            self.last["train_loss"] = loss
        else:
            self.skipped += 1
        self.optimizer.zero_grad(set_to_none=self.world.size == 1)
        self.done, self.tokens = step + 1, self.tokens + tokens
        speed = self.meter.lap(tokens, self.objective.unpadded(rows))
        improved = self._report(**sums, learning_rate=rate, grad_norm=norm, tokens_per_second=speed)
        if self.skipped > recipe.max_nonfinite_steps:
            raise StageError(
                f"step {step + 1}: loss {loss}, gradient norm {norm}; {self.skipped} steps were not finite or had no "
                f"supervised token, max_nonfinite_steps is {recipe.max_nonfinite_steps}; lower learning_rate (now "
                f"{recipe.learning_rate:g}) or look at the data set"
            )
        last = self.done == steps or self.stopped
        if last or self.done % self.job.checkpoint_every == 0 or (improved and recipe.export is Weights.best):
            self._checkpoint()

    def _look_at(self, loss: float) -> None:
        """Before any weight has changed: stop for what cannot be trained, warn of what looks wrong."""
        probes.require_first_loss(loss)
        if warning := probes.unlike(loss, self.objective.untrained_loss):
            self.line(event=warning)
        if self.job.base is None and (warning := probes.unexpected(self.model, loss)):
            self.line(event=warning)

    def _backward(self, rows: Int64, weight: int) -> dict[str, float]:
        """Gradients of the step's mean loss; returns what this rank adds to the sums of the step, `loss` among them."""
        # DDP averages over ranks, so the factor world.size turns its mean of sums into the sum that was wanted.
        scale = self.world.size / max(weight, 1)
        sums: dict[str, float] = {}
        with self.meter.waiting():
            batches = list(self._batches(rows))
        for index, micro in enumerate(batches):
            with self._summing(last=index == len(batches) - 1):
                with device.autocast(self.job.recipe.precision, self.world.device):
                    loss, shown = split(self.ddp(**micro))
                (loss * scale).backward()
            for name, value in ({"loss": loss.detach()} | shown).items():
                sums[name] = sums.get(name, 0.0) + float(value)
            self.meter.padded += micro["input_ids"].numel()
        return sums

    def _summing(self, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch: gradients are summed over the ranks after the last one of a step."""
        if self.sharded:
            return sharding.accumulating(self.model, last)
        return nullcontext() if last or self.world.size == 1 else self.ddp.no_sync()

    def _batches(self, rows: Int64) -> Iterator[Batch]:
        """This rank's share of a step's rows; at least one batch, and of a split model as many as the other ranks have."""
        size = self.job.micro_batch_rows
        mine = longest_first(rows, self.objective.lengths)[self.world.rank :: self.world.size]
        for first in range(0, len(mine), size):
            yield on(self.world.device, self.objective.batch(mine[first : first + size]))
        for _ in range(-(-len(mine) // size), self.world.passes(len(rows), size) if self.sharded else 1):
            yield on(self.world.device, self.objective.weightless())

    def _report(self, **values: float) -> bool:
        """A line for the step that was done, with a pass over the validation split where one is due; whether that found the
        best loss so far."""
        recipe, improved = self.job.recipe, False
        values |= {"tokens": self.tokens, "skipped": self.skipped}
        if self.done == self.sampler.steps or (recipe.validate_every and self.done % recipe.validate_every == 0):
            found = self.objective.validate(self.world)
            improved = self.best.see(self.done, found["validation_loss"], recipe.early_stopping)
            # Every rank has the same sums; what rank 0 makes of them holds, so that none can be left waiting.
            self.stopped = self.world.share(self.best.stops(recipe.early_stopping))
            values |= found | {"best_validation_loss": self.best.loss, "best_step": self.best.step}
            self.last |= found
            if self.done == self.sampler.steps or self.stopped:
                probes.require_last_loss(self.done, found["validation_loss"], recipe, self.best)
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        if self.writer:
            finite |= self.host.sample()
        self.line(step=self.done, steps=self.sampler.steps, at=time.time(), **finite)
        if self.stopped and self.done < self.sampler.steps:
            self.line(
                event=f"stopped early at step {self.done}: {self.best.worse} validations brought nothing better than "
                f"{self.best.loss:.4f} of step {self.best.step}"
            )
        self.meter.restart()
        return improved

    def line(self, **values: Any) -> None:
        """Append a line, on rank 0."""
        if self.writer:
            self.writer.write(**values)
            self.on_line()

    @property
    def checkpoints(self) -> Path:
        return self.job.work / "checkpoints"

    def _checkpoint(self) -> None:
        state = {
            "step": self.done,
            "sampler": self.sampler.state(self.done),
            "tokens": self.tokens,
            "skipped": self.skipped,
            "last": self.last,
            "best": asdict(self.best),
        }
        if self.world.rank == 0:
            checkpoints.begin(self.checkpoints, self.done)
        if self.sharded:
            self.world.wait()
            sharding.save(
                checkpoints.writing(self.checkpoints, self.done) / sharding.SHARDS, self.model, self.optimizer
            )
            self.world.wait()
        else:
            state |= {"model": adapters.state(self.model), "optimizer": self.optimizer.state_dict()}
        if self.world.rank == 0:
            best = self.best.step if self.job.recipe.export is Weights.best else None
            checkpoints.complete(self.checkpoints, self.done, state, keep=self.job.keep_checkpoints, best=best)
            self.meter.restart()

    def summarise(self) -> None:
        """A line with what this process measured since its start, and how that compares with what was expected."""
        padded = self.world.sum(self.meter.padded)
        facts = self.meter.summary(padded)
        self.line(summary=facts | self.forecast.against(facts), histogram=self.meter.histogram())

    def take_weights(self) -> None:
        """Have the weights that leave in `model`: whole, and the best ones where these are wanted. On all ranks."""
        if self.job.recipe.export is Weights.best and self.best.step not in (0, self.done):
            self._restore(checkpoints.of_step(self.checkpoints, self.best.step))
        if self.sharded:
            weights = sharding.whole(self.model)
            if self.world.rank == 0:
                self.model = sharding.put(self.objective.fresh(), weights)

    def export(self) -> None:
        """Write the finished model where the launcher picks it up."""
        summary = {
            "steps": self.done,
            "tokens": self.tokens,
            "skipped_steps": self.skipped,
            "train_loss": self.last.get("train_loss"),
            "validation_loss": self.last.get("validation_loss"),
        }
        stops, probe = self.objective.export_facts()
        self.model.cpu()
        export(self.model, self.job, summary | self.objective.summary(), stop_token_ids=stops, probe=probe)

    def _plan(self) -> str:
        """What the recipe comes to."""
        recipe, steps, batch = self.job.recipe, self.sampler.steps, self.sampler.rows_per_step
        accumulated = -(-batch // (self.job.micro_batch_rows * self.world.size))
        warmup = optimizer.warmup_steps(steps, recipe.schedule)
        return f"{steps} steps of {batch} rows, {accumulated} accumulated, warm-up {warmup} steps"


def _record_environment(job: Job, world: World) -> None:
    directory = job.work / "workers"
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(environment(world), indent=2, sort_keys=True)
    (directory / f"rank-{world.rank}.json").write_text(text + "\n", "utf-8")
