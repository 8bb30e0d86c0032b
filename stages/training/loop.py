"""The training loop: one process of one world, whoever launched it. Apart from `train.py`, because it imports neither ray
nor torchrun, so that the same body runs under either and can be compared, debugged and tested as a function.

Each rank computes which rows a step has, takes its share, and divides its summed loss by the number of supervised tokens
of the whole step. Everything random is a function of seed and step, so that a checkpoint needs no random state.
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

from stages.artifacts import TokenDataset
from stages.contract import StageError
from stages.text.packed import PackedSplit
from stages.training import checkpoints, model, optimizer
from stages.training.config import Job, Precision
from stages.training.export import export
from stages.training.follow import METRICS, Writer
from stages.training.loss import Batch, SummedLoss, batch, summed, supervised_tokens, weightless
from stages.training.sampler import RowSampler, mix
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
        self.facts = TokenDataset(uri=job.dataset.resolve().as_uri()).summary()
        self.split = PackedSplit.read(job.dataset, "train")
        self.validation = PackedSplit.read(job.dataset, "validation")
        self.model = _model(job, self.facts, self.split.input_ids.shape[1])
        model.require_isolation(self.model, self.facts["vocab_size"])
        self.loss = SummedLoss(self.model)
        self.optimizer = optimizer.adamw(
            self.model, job.recipe.weight_decay, (job.recipe.adam_beta1, job.recipe.adam_beta2)
        )
        length = self.split.input_ids.shape[1]
        self.sampler = RowSampler(
            rows=len(self.split),
            rows_per_step=job.recipe.rows_per_step(length),
            total_rows=job.recipe.total_rows(len(self.split), length),
            seed=job.seed,
            sources=mix(
                self.split.sources, {source["name"]: source["weight"] for source in self.facts.get("sources", [])}
            ),
        )
        self.supervised = supervised_tokens(self.split)
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
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.tokens, self.skipped, self.last = state["tokens"], state["skipped"], state["last"]
            self.line(event=f"resumed from step {step}")
        elif self.writer and self.writer.found:
            self.line(event="begins again at step 0: the attempt before left no checkpoint")
        self.model.train()
        self.ddp: Any = self.loss
        if self.world.size > 1:
            self.ddp = DistributedDataParallel(self.loss, forward_sync_buffers=False, gradient_as_bucket_view=True)
            # DDP regroups its gradient buckets after its first backward pass. That pass is taken here, on nothing, so
            # that a resumed run sums gradients in the same groups as the undisturbed one.
            self.ddp(**weightless(self.split)).backward()
            self.optimizer.zero_grad(set_to_none=False)
        self.clock = time.monotonic()
        return step

    def step(self, step: int) -> None:
        """One optimizer step: forward and backward over this rank's share, clip, update, report, perhaps checkpoint."""
        recipe, steps = self.job.recipe, self.sampler.steps
        torch.manual_seed(int(np.random.SeedSequence([self.job.seed, step, self.world.rank]).generate_state(1)[0]))
        rows = self.sampler.step(step)
        supervised = int(self.supervised[rows].sum())
        total = self._backward(rows, supervised)
        loss = self.world.sum(total) / max(supervised, 1)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.max_grad_norm))
        rate = optimizer.learning_rate(
            step, steps, recipe.learning_rate, recipe.min_learning_rate_ratio, recipe.warmup_ratio
        )
        # Loss and gradients are sums over all ranks by now, so every rank decides the same without asking.
        if supervised and math.isfinite(loss) and math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.last["train_loss"] = loss
        else:
            self.skipped += 1
        self.optimizer.zero_grad(set_to_none=self.world.size == 1)
        self.tokens += supervised
        self._report(step + 1, supervised, loss=loss, learning_rate=rate, grad_norm=norm)
        if self.skipped > recipe.max_skipped_steps:
            raise StageError(
                f"step {step + 1}: loss {loss}, gradient norm {norm}; {self.skipped} steps were not finite or had no "
                f"supervised token, max_skipped_steps is {recipe.max_skipped_steps}; lower learning_rate (now "
                f"{recipe.learning_rate:g}) or look at the data set"
            )
        if (step + 1) % self.job.checkpoint_every == 0 or step + 1 == steps:
            self._checkpoint(step + 1)

    def _backward(self, rows: np.ndarray[Any, np.dtype[np.int64]], supervised: int) -> float:
        """Gradients of the step's mean loss over all its supervised tokens; returns this rank's summed loss in nats."""
        # DDP averages over ranks, so the factor world.size turns its mean of sums into the sum that was wanted.
        scale = self.world.size / max(supervised, 1)
        total = 0.0
        batches = list(self._batches(rows[self.world.rank :: self.world.size]))
        for index, micro in enumerate(batches):
            accumulate = self.world.size > 1 and index < len(batches) - 1
            with self.ddp.no_sync() if accumulate else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=self.job.recipe.precision is Precision.bfloat16):
                    loss = self.ddp(**micro)
                (loss * scale).backward()
            total += float(loss.detach())
        return total

    def _batches(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Iterator[Batch]:
        size = self.job.micro_batch_rows
        for first in range(0, len(rows), size):
            yield batch(self.split, rows[first : first + size])
        if not len(rows):
            yield weightless(self.split)

    def validate(self) -> float:
        """Mean loss over every supervised token of the validation split: a sum over a sum, whatever the batches."""
        rows = np.arange(self.world.rank, len(self.validation), self.world.size)
        total = self.world.sum(summed(self.loss, self.validation, rows, self.job.micro_batch_rows))
        return total / max(int(supervised_tokens(self.validation).sum()), 1)

    def _report(self, step: int, supervised: int, **values: float) -> None:
        now = time.monotonic()
        speed, self.clock = supervised / (now - self.clock), now
        values |= {"tokens": self.tokens, "tokens_per_second": speed, "skipped": self.skipped}
        every = self.job.recipe.validate_every
        if step == self.sampler.steps or (every and step % every == 0):
            values["validation_loss"] = self.last["validation_loss"] = self.validate()
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
                "model": self.model.state_dict(),
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
            "sequence_length": self.facts["sequence_length"],
        }
        if self.sampler.sources:
            summary["sources"] = self._realised()
        probe = self.validation.input_ids[:1, :128]
        stops = self.facts.get("stop_token_ids", [self.facts["eos_token_id"]])
        export(self.model, self.job, summary, stop_token_ids=stops, probe=probe)

    def _realised(self) -> dict[str, dict[str, float]]:
        """What training drew from each source of a mix: rows, their share of all rows, passes over the source."""
        counts = self.sampler.realised()
        return {
            source.name: {
                "rows": counts[source.name],
                "share": round(counts[source.name] / self.sampler.total_rows, 6),
                "epochs": round(counts[source.name] / len(source.rows), 4),
            }
            for source in self.sampler.sources
        }


def _model(job: Job, facts: dict[str, Any], sequence_length: int) -> Any:
    vocabulary = facts["vocab_size"]
    if job.base is not None:
        loaded = model.load(job.base)
        if facts.get("added_tokens"):
            model.widen(loaded, vocabulary)
        if loaded.config.vocab_size < vocabulary:
            raise StageError(
                f"the data set's tokenizer has {vocabulary} tokens, the base model {loaded.config.vocab_size}; "
                "tokenize with the base model's tokenizer (connect it to the tokenize stage)"
            )
    else:
        assert job.model is not None
        loaded = model.build(job.model, vocab_size=vocabulary, eos_token_id=facts["eos_token_id"], seed=job.seed)
    longest = getattr(loaded.config, "max_position_embeddings", sequence_length)
    if sequence_length > longest:
        raise StageError(
            f"sequences are {sequence_length} tokens long, the model takes {longest}; lower the tokenize stage's "
            "sequence_length or raise model.max_position_embeddings"
        )
    return loaded


def _record_environment(job: Job, world: World) -> None:
    directory = job.work / "workers"
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(environment(world), indent=2, sort_keys=True)
    (directory / f"rank-{world.rank}.json").write_text(text + "\n", "utf-8")
