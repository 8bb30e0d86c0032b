"""Preference pairs as the loop sees them: the objective of direct preference optimisation. Apart from its loss, which
evaluation takes without any of this."""

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import torch

from stages.artifacts import PairDataset
from stages.contract import StageError
from stages.text.corpus import shards
from stages.text.pairs import REFERENCE
from stages.training import adapters
from stages.training import model as models
from stages.training.config import Job
from stages.training.dpo_loss import SHOWN, PairLoss, log_probabilities, padded
from stages.training.loss import Batch, on
from stages.training.pair_recipe import PairRecipe, ReferenceFrom
from stages.training.sampler import RowSampler
from stages.training.world import World

Int64 = npt.NDArray[np.int64]
Lists = list[npt.NDArray[np.int32]]
DROPOUTS = ("attention_dropout", "dropout", "activation_dropout", "hidden_dropout", "attn_dropout", "resid_dropout")
"""Attributes in which modules keep a probability that is no module of its own."""


@dataclass(frozen=True)
class Pairs:
    """One split of a PairDataset in memory."""

    ids: list[str]
    prompts: Lists
    chosen: Lists
    rejected: Lists
    reference: npt.NDArray[np.float32] | None
    """[2, pairs]: the stored log-probability of the chosen and of the rejected answer, if any is stored."""

    @classmethod
    def read(cls, directory: Path, split: str) -> "Pairs":
        """Read `split` ("train" or "validation"). StageError when it has no pairs."""
        if not (directory / split).is_dir():
            raise StageError(
                f"the data set has no pairs in its {split} split; give more rows or a larger validation share to the clean stage"
            )
        table = pyarrow.concat_tables(pyarrow.parquet.read_table(shard) for shard in shards(directory, split))
        prompts, chosen, rejected = (_lists(table.column(f"{name}_ids")) for name in ("prompt", "chosen", "rejected"))
        stored = None
        if set(REFERENCE) <= set(table.column_names):
            stored = np.stack([table.column(name).to_numpy() for name in REFERENCE])
        return cls(table.column("id").to_pylist(), prompts, chosen, rejected, stored)

    def __len__(self) -> int:
        return len(self.prompts)

    def tokens(self, rows: Int64) -> int:
        """Tokens of both answers of these pairs."""
        return sum(len(self.chosen[row]) + len(self.rejected[row]) for row in rows)

    def length(self, row: int) -> int:
        """Tokens of the prompt with its longer answer."""
        return len(self.prompts[row]) + max(len(self.chosen[row]), len(self.rejected[row]))

    def batch(self, rows: Int64, stored: bool) -> Batch:
        """The arguments of `PairLoss`; with what is `stored` of the reference, or without."""
        prompts = [self.prompts[row] for row in rows]
        made = padded(prompts * 2, [answers[row] for answers in (self.chosen, self.rejected) for row in rows])
        made["weight"] = torch.ones(len(rows))
        if stored:
            assert self.reference is not None
            made["reference"] = torch.from_numpy(self.reference[:, rows])
        return made

    def alike(self, rows: Int64, size: int) -> list[Int64]:
        """These rows in batches of neighbours in length, so that little is padded."""
        ordered = np.array(sorted(rows.tolist(), key=lambda row: (self.length(row), row)), np.int64)
        return [ordered[first : first + size] for first in range(0, len(ordered), size)]


class Preferences:
    """Direct preference optimisation: the objective of the `dpo` stage."""

    untrained_loss: float | None = math.log(2)  # whatever the label smoothing

    def __init__(self, job: Job, world: World) -> None:
        assert isinstance(job.recipe, PairRecipe) and job.base is not None
        if job.sharded and job.recipe.adapter is not None and job.recipe.adapter.modules_to_save:
            raise StageError(
                "resources.sharding=full with adapter.modules_to_save: switching the adapter off for the reference loses these "
                "modules from checkpoints; set resources.sharding=none, or leave modules_to_save empty"
            )
        self.job, self.recipe = job, job.recipe
        self.facts = PairDataset(uri=job.dataset.resolve().as_uri()).summary()
        self.pairs = Pairs.read(job.dataset, "train")
        self.validation = Pairs.read(job.dataset, "validation")
        self.lengths = np.array([self.pairs.length(row) for row in range(len(self.pairs))], np.int64)
        self.model, reference = self._models(job.base, world)
        self.module = PairLoss(
            self.model, beta=job.recipe.beta, label_smoothing=job.recipe.label_smoothing, reference=reference
        )
        self.stored = reference is None
        self.sampler = RowSampler(
            rows=len(self.pairs),
            rows_per_step=job.recipe.pairs_per_step,
            total_rows=job.recipe.total_rows(len(self.pairs)),
            seed=job.seed,
        )

    def _models(self, base: Path, world: World) -> tuple[Any, Any]:
        """(the policy, what gives the reference's log-probabilities or None when they are stored)."""
        loaded = self._loaded(base)
        source = self._source()
        self.reference: ReferenceFrom | None = source
        copied = source is ReferenceFrom.copy
        frozen = copy.deepcopy(loaded).requires_grad_(False).eval().to(world.device) if copied else None
        loaded = self._adapted(loaded)
        if source is ReferenceFrom.columns:
            return loaded, None
        return loaded, Frozen(frozen) if frozen is not None else AdapterOff(loaded)

    def _loaded(self, base: Path) -> Any:
        loaded = models.load(base)  # an adapter that the base came with is merged: the reference is with it
        no_dropout(loaded)
        return loaded

    def _adapted(self, loaded: Any) -> Any:
        if self.recipe.adapter is not None:
            loaded = adapters.attach(loaded, self.recipe.adapter, self.job.seed)
            no_dropout(loaded)
        return loaded

    def fresh(self) -> Any:
        assert self.job.base is not None
        return self._adapted(self._loaded(self.job.base))

    def _source(self) -> ReferenceFrom:
        if self.recipe.reference is ReferenceFrom.columns and self.pairs.reference is None:
            raise StageError(
                "reference=columns: the data set stores no log-probabilities of a reference; choose pair=reference, or leave "
                "stages.dpo.reference null"
            )
        if self.recipe.reference is not None:
            return self.recipe.reference
        if self.pairs.reference is not None:
            return ReferenceFrom.columns
        return ReferenceFrom.adapter_off if self.recipe.adapter is not None else ReferenceFrom.copy

    def weight(self, rows: Int64) -> int:
        return len(rows)

    def tokens(self, rows: Int64) -> int:
        return self.pairs.tokens(rows)

    def unpadded(self, rows: Int64) -> int:
        return self.pairs.tokens(rows) + 2 * sum(len(self.pairs.prompts[row]) for row in rows)

    def batch(self, rows: Int64) -> Batch:
        return self.pairs.batch(rows, self.stored)

    def weightless(self) -> Batch:
        made = self.batch(np.zeros(1, np.int64))
        made["weight"].zero_()
        return made

    def validate(self, world: World) -> dict[str, float]:
        mine = np.arange(world.rank, len(self.validation), world.size)
        passes = world.passes(len(self.validation), self.job.micro_batch_rows) if self.job.sharded else 0
        sums = summed(self.module, self.validation, mine, self.job.micro_batch_rows, self.stored, passes)
        return {f"validation_{name}": world.sum(value) / len(self.validation) for name, value in sums.items()}

    def summary(self) -> dict[str, Any]:
        return {
            "sequence_length": self.facts["sequence_length"],
            "beta": self.recipe.beta,
            "reference_digest": self.facts["base_digest"],
        }

    def export_facts(self) -> tuple[list[int], Int64]:
        probe = np.concatenate([self.validation.prompts[0], self.validation.chosen[0]])[None, :128]
        return self.facts["stop_token_ids"], probe.astype(np.int64)


class Frozen:
    """A reference that is a model of its own. No module, so that nothing counts, wraps or saves its weights."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return log_probabilities(self.model, input_ids, labels)


class AdapterOff:
    """A reference that is the trained model without its adapter, and with the modules that it came with."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with self.model.disable_adapter():
            return log_probabilities(self.model, input_ids, labels)


def no_dropout(model: Any) -> None:
    """Policy and reference must differ by what was learned alone. The configuration keeps what it says."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in DROPOUTS:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@torch.no_grad()
def summed(module: PairLoss, pairs: Pairs, rows: Int64, size: int, stored: bool, at_least: int = 0) -> dict[str, float]:
    """What these pairs add to the loss and to each sum that is shown beside it, in `at_least` so many passes."""
    was_training, device = module.training, next(module.parameters()).device
    module.eval()
    sums = dict.fromkeys(("loss", *SHOWN), 0.0)
    for some in pairs.alike(rows, size):
        loss, shown = module(**on(device, pairs.batch(some, stored)))
        for name, value in ({"loss": loss} | shown).items():
            sums[name] += float(value)
    for _ in range(-(-len(rows) // size), at_least):
        module(**on(device, pairs.batch(np.zeros(1, np.int64), stored)))
    module.train(was_training)
    return sums


def _lists(column: pyarrow.ChunkedArray) -> Lists:
    array = column.combine_chunks()
    return np.split(array.flatten().to_numpy(), array.offsets.to_numpy()[1:-1])
