"""The settings of a model's shape and of how its weights are optimised. Apart and free of torch, so that configs compose
in milliseconds and every verb that trains shares one set of names, defaults and checks."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from stages.contract import StageConfig


@dataclass(kw_only=True)
class ModelConfig:
    """Shape of a Llama-architecture model that starts from random weights. The vocabulary size comes from the data set."""

    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the gated feed-forward layer."""
    num_hidden_layers: int
    """Decoder layers."""
    num_attention_heads: int
    """Query heads; must divide hidden_size into heads of even width."""
    num_key_value_heads: int
    """Key and value heads (grouped-query attention); must divide num_attention_heads."""
    tie_word_embeddings: bool = True
    """Share one matrix between the input embedding and the output head."""
    max_position_embeddings: int = 1024
    """Longest sequence, in tokens, that the model is declared to serve; at least the data set's sequence_length."""
    rope_theta: float = 10000.0
    """Base of the rotary position frequencies."""
    initializer_range: float = 0.02
    """Standard deviation of the random initial weights."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            _require(getattr(self, name) >= 1, f"model.{name} must be at least 1, got {getattr(self, name)}")
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        _require(
            self.hidden_size % (2 * heads) == 0,
            f"model.hidden_size must be a multiple of 2 * num_attention_heads = {2 * heads}, got {self.hidden_size}",
        )
        _require(
            groups >= 1 and heads % groups == 0,
            f"model.num_key_value_heads must divide num_attention_heads = {heads}, got {groups}",
        )


class Precision(Enum):
    """Number format of matrix products while training."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass(kw_only=True)
class Recipe(StageConfig):
    """How weights are optimised: what every training verb has in common. Exactly one of max_steps, max_tokens and epochs
    says how long; time is never a unit of training."""

    learning_rate: float = 1e-3
    """Peak of the cosine schedule."""
    min_learning_rate_ratio: float = 0.1
    """Learning rate of the last step, as a share of the peak."""
    warmup_ratio: float = 0.05
    """Share of all steps over which the learning rate rises linearly to its peak."""
    weight_decay: float = 0.1
    """Decoupled weight decay (AdamW) of matrices; norms, biases and embeddings have none."""
    adam_beta1: float = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: float = 0.95
    """Decay of AdamW's second moment."""
    max_grad_norm: float = 1.0
    """Gradients with a larger global L2 norm are scaled down to it."""
    max_steps: int | None = None
    """Length of training in optimizer steps."""
    max_tokens: int | None = None
    """Length of training in tokens of packed rows, rounded up to whole steps."""
    epochs: float | None = None
    """Length of training in passes over the training split, rounded up to whole steps."""
    tokens_per_step: int = 8192
    """Tokens of packed rows in one optimizer step over all workers, rounded to whole rows (at least one)."""
    precision: Precision = Precision.float32
    """Number format of matrix products in the training steps. bfloat16 is 1.3 to 1.5 times as fast on processors that
    multiply it (avx512_bf16, AMX) and slower on others; weights, loss, optimizer and validation stay float32."""
    validate_every: int = 100
    """Optimizer steps between passes over the whole validation split; the last step always has one. 0: only the last."""
    max_skipped_steps: int = 3
    """Steps with a non-finite loss or gradient are skipped on all workers together; one more than this stops training."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_grad_norm"):
            _require(getattr(self, name) > 0, f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("min_learning_rate_ratio", "warmup_ratio"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"{name} must be from 0 to 1, got {value}")
        for name in ("adam_beta1", "adam_beta2"):
            _require(0 <= getattr(self, name) < 1, f"{name} must be from 0 to below 1, got {getattr(self, name)}")
        for name in ("weight_decay", "validate_every", "max_skipped_steps"):
            _require(getattr(self, name) >= 0, f"{name} must be 0 or more, got {getattr(self, name)}")
        _require(self.tokens_per_step >= 1, f"tokens_per_step must be at least 1, got {self.tokens_per_step}")
        lengths = {n: getattr(self, n) for n in ("max_steps", "max_tokens", "epochs") if getattr(self, n) is not None}
        _require(
            len(lengths) == 1,
            f"set exactly one of max_steps, max_tokens, epochs, got {lengths or 'none'}; set the others to null",
        )
        for name, value in lengths.items():
            _require(value > 0, f"{name} must be above 0, got {value}")

    def rows_per_step(self, sequence_length: int) -> int:
        """Packed rows in one optimizer step over all workers."""
        return max(1, round(self.tokens_per_step / sequence_length))

    def total_rows(self, rows: int, sequence_length: int) -> int:
        """Packed rows that all of training takes from a training split of `rows` rows; the last step may be smaller."""
        batch = self.rows_per_step(sequence_length)
        if self.epochs is not None:
            return max(1, round(self.epochs * rows))
        if self.max_tokens is not None:
            return batch * -(-self.max_tokens // (batch * sequence_length))
        assert self.max_steps is not None
        return batch * self.max_steps


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run as the loop sees it: the same for every rank and for every launcher."""

    recipe: Recipe
    model: ModelConfig | None
    """Shape of a model to start from random weights; None when `base` is given."""
    base: Path | None
    """Directory of the checkpoint to start from."""
    dataset: Path
    """Directory of the TokenDataset."""
    work: Path
    """Resumable state: `checkpoints/`, `metrics.jsonl`, `export/`, `workers/`."""
    seed: int
    golden_prompts: tuple[str, ...]
    micro_batch_rows: int
    """Packed rows in one forward pass; does not change the result beyond rounding."""
    checkpoint_every: int
    """Optimizer steps between resumable checkpoints."""
    threads: int
    """Threads of one worker's tensor operations."""


GOLDEN_PROMPTS = ("The ", "Return ", "import os\n", "def ")
"""Questions that a server must answer as the exporter did. Generic, so that any model has an opinion about them."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
