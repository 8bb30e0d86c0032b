"""What the loop minimises, as the loop sees it: rows in, a summed loss and its weight out. Apart, because the loop is one
for every verb that trains, and what differs between them is only this.

An objective owns the data and the model. It never takes a mean: the loop divides once, by the weight of the whole step over
all ranks and accumulated batches.
"""

from collections.abc import Sized
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from stages.artifacts import TokenDataset
from stages.contract import StageError
from stages.text.packed import PackedSplit
from stages.training import adapters
from stages.training import model as models
from stages.training.config import Job, TokenRecipe
from stages.training.loss import Batch, SummedLoss, batch, summed, supervised_tokens, weightless
from stages.training.pair_recipe import PairRecipe, ReferenceFrom
from stages.training.preferences import Preferences
from stages.training.sampler import RowSampler, mix
from stages.training.world import World

Int64 = npt.NDArray[np.int64]


class Objective(Protocol):
    """One rank's data, model and loss."""

    model: Any
    """What is trained and exported."""
    module: torch.nn.Module
    """`module(**batch)` -> the summed loss, or (the summed loss, {name: a sum to show beside it, without a gradient}). What
    DDP wraps."""
    sampler: RowSampler
    lengths: Int64
    """[rows] tokens of each row of the training split before its padding."""
    untrained_loss: float | None
    """The loss before the first step, where it is known beforehand."""
    reference: ReferenceFrom | None
    """Where log-probabilities of a second model come from, if the loss needs them."""

    @property
    def validation(self) -> Sized:
        """Rows of the validation split."""

    def weight(self, rows: Int64) -> int:
        """By what the summed loss of these rows is divided: supervised tokens, or pairs."""

    def tokens(self, rows: Int64) -> int:
        """Tokens of these rows that the loss is taken on: what speed is counted in."""

    def unpadded(self, rows: Int64) -> int:
        """Tokens of these rows that are no padding, prompts included."""

    def batch(self, rows: Int64) -> Batch:
        """The arguments of `module` for these rows of the training split."""

    def weightless(self) -> Batch:
        """A batch that adds exactly zero, for a rank that has no row of its own in a step."""

    def validate(self, world: World) -> dict[str, float]:
        """Metrics over the whole validation split, `validation_loss` among them: sums over sums, whatever the batches."""

    def fresh(self) -> Any:
        """A whole model of the same make as `model`, which may be split by now; its weights are to be replaced."""

    def summary(self) -> dict[str, Any]:
        """What the exported checkpoint says of its data."""

    def export_facts(self) -> tuple[list[int], npt.NDArray[np.int64]]:
        """(the ids that end what was learned, ids [1, length] on which the export is compared with memory)"""


def objective_of(job: Job, world: World) -> Objective:
    """The objective that the recipe is of."""
    return Preferences(job, world) if isinstance(job.recipe, PairRecipe) else NextTokens(job, world)


def split(output: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(the summed loss, sums to show) of what a module gave."""
    return output if isinstance(output, tuple) else (output, {})


class NextTokens:
    """Cross entropy of the next token on packed rows."""

    untrained_loss: float | None = None

    reference: ReferenceFrom | None = None

    def __init__(self, job: Job, world: World) -> None:
        assert isinstance(job.recipe, TokenRecipe)
        self.job = job
        self.facts = TokenDataset(uri=job.dataset.resolve().as_uri()).summary()
        self.split = PackedSplit.read(job.dataset, "train")
        self.validation = PackedSplit.read(job.dataset, "validation")
        length = self.split.input_ids.shape[1]
        self.model = _model(job, self.facts, length)
        models.require_isolation(self.model, self.facts["vocab_size"])
        self.module = SummedLoss(self.model)
        weights = {source["name"]: source["weight"] for source in self.facts.get("sources", [])}
        self.sampler = RowSampler(
            rows=len(self.split),
            rows_per_step=job.recipe.rows_per_step(length),
            total_rows=job.recipe.total_rows(len(self.split), length),
            seed=job.seed,
            sources=mix(self.split.sources, weights),
        )
        self.supervised, self.lengths = supervised_tokens(self.split), self.split.lengths

    def weight(self, rows: Int64) -> int:
        return int(self.supervised[rows].sum())

    tokens = weight

    def unpadded(self, rows: Int64) -> int:
        return int(self.lengths[rows].sum())

    def batch(self, rows: Int64) -> Batch:
        return batch(self.split, rows)

    def weightless(self) -> Batch:
        return weightless(self.split)

    def validate(self, world: World) -> dict[str, float]:
        rows = np.arange(world.rank, len(self.validation), world.size)
        passes = world.passes(len(self.validation), self.job.micro_batch_rows) if self.job.sharded else 0
        total = world.sum(summed(self.module, self.validation, rows, self.job.micro_batch_rows, passes))
        return {"validation_loss": total / max(int(supervised_tokens(self.validation).sum()), 1)}

    def fresh(self) -> Any:
        return _model(self.job, self.facts, self.split.input_ids.shape[1])

    def summary(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"sequence_length": self.facts["sequence_length"]}
        if self.sampler.sources:
            facts["sources"] = self._realised()
        return facts

    def export_facts(self) -> tuple[list[int], npt.NDArray[np.int64]]:
        stops = self.facts.get("stop_token_ids", [self.facts["eos_token_id"]])
        return stops, self.validation.input_ids[:1, :128].astype(np.int64)

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
        loaded = models.load(job.base)
        if facts.get("added_tokens"):
            adapters.require_trained_rows(loaded, job.recipe.adapter, facts["added_tokens"])
            models.widen(loaded, vocabulary, facts["added_tokens"])
        if loaded.config.vocab_size < vocabulary:
            raise StageError(
                f"the data set's tokenizer has {vocabulary} tokens, the base model {loaded.config.vocab_size}; "
                "tokenize with the base model's tokenizer (connect it to the tokenize stage)"
            )
    else:
        assert job.model is not None
        loaded = models.build(job.model, vocab_size=vocabulary, eos_token_id=facts["eos_token_id"], seed=job.seed)
    longest = getattr(loaded.config, "max_position_embeddings", sequence_length)
    if sequence_length > longest:
        raise StageError(
            f"sequences are {sequence_length} tokens long, the model takes {longest}; lower the tokenize stage's "
            "sequence_length or raise model.max_position_embeddings"
        )
    return loaded if job.recipe.adapter is None else adapters.attach(loaded, job.recipe.adapter, job.seed)
