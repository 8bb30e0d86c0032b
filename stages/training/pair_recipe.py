"""The settings of preference optimisation: what it has beside every other training. Apart and free of torch, because the
verb and the loop share it."""

from dataclasses import dataclass, field
from enum import Enum

from stages.training.config import Optimizer, Recipe


class ReferenceFrom(Enum):
    """Where the reference's log-probabilities come from. All are the model before training, which never moves."""

    columns = "columns"
    adapter_off = "adapter_off"
    copy = "copy"


@dataclass(kw_only=True)
class PairRecipe(Recipe):
    """Of direct preference optimisation on pairs."""

    learning_rate: float = 1e-6
    """Peak of the schedule: 1e-6 to 5e-6 when all weights are trained, about ten times that for an adapter. A rate of
    supervised fine-tuning destroys the model within tens of steps: `drift` shows it."""
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(weight_decay=0.0))
    """What takes the steps. No decay by default: it would pull the policy away from its reference."""
    pairs_per_step: int = 32
    """Pairs in one optimizer step over all workers."""
    beta: float = 0.1
    """How strongly the policy is held to its reference: rewards are beta times the log ratio of both, so a larger beta moves
    the policy less."""
    label_smoothing: float = 0.0
    """Share of the pairs that are taken to be labelled the wrong way round; from 0 to below 0.5."""
    reference: ReferenceFrom | None = None
    """`columns`: stored in the data set (pair=reference), nothing more to compute. `adapter_off`: the model without its
    adapter, one more forward pass a step. `copy`: a second, frozen model, one more pass and its memory. null: the first of these
    that there is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pairs_per_step < 1:
            raise ValueError(f"pairs_per_step must be at least 1, got {self.pairs_per_step}")
        if self.beta <= 0:
            raise ValueError(f"beta must be above 0, got {self.beta}")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be from 0 to below 0.5, got {self.label_smoothing}")
        if self.adapter is not None and self.adapter.dropout > 0:
            raise ValueError(
                f"adapter.dropout must be 0 in preference optimisation, got {self.adapter.dropout}: policy and reference must differ "
                "by what was learned alone"
            )
        if self.reference is ReferenceFrom.adapter_off and self.adapter is None:
            raise ValueError("reference must not be adapter_off without an adapter: set adapter, or reference=copy")

    def total_rows(self, pairs: int) -> int:
        """Pairs that all of training takes from a training split of `pairs`; the last step may be smaller."""
        if self.epochs is not None:
            return max(1, round(self.epochs * pairs))
        assert self.max_steps is not None
        return self.pairs_per_step * self.max_steps
