"""The settings of a model's shape and of how its weights are optimised. Apart and free of torch, so that configs compose
in milliseconds and every verb that trains shares one set of names, defaults and checks."""

from dataclasses import dataclass, field
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


class Shape(Enum):
    """Course of the learning rate after its linear rise."""

    cosine = "cosine"
    linear = "linear"
    wsd = "wsd"
    constant = "constant"


@dataclass(kw_only=True)
class Schedule:
    """The learning rate over the optimizer steps, as shares of all of them and of its peak."""

    shape: Shape = Shape.cosine
    """After the warm-up: `cosine` or `linear` from the peak to the minimum; `wsd` (warm-up, stable, decay) stays at the peak
    and falls linearly at the end; `constant` stays at the peak."""
    warmup_ratio: float = 0.05
    """Share of all steps over which the learning rate rises linearly to its peak, which the last of them has."""
    decay_ratio: float = 0.2
    """Share of all steps, at the end, over which `wsd` falls; the other shapes have no use for it."""
    minimum_ratio: float = 0.1
    """Learning rate of the last step, as a share of the peak; `constant` has no use for it."""

    def __post_init__(self) -> None:
        for name in ("warmup_ratio", "decay_ratio", "minimum_ratio"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"schedule.{name} must be from 0 to 1, got {value}")
        if self.shape is Shape.wsd:
            both = self.warmup_ratio + self.decay_ratio
            _require(both <= 1, f"schedule.warmup_ratio and decay_ratio must be at most 1 together, got {both:g}")


class Algorithm(Enum):
    """How a gradient becomes a step."""

    adamw = "adamw"
    adafactor = "adafactor"


@dataclass(kw_only=True)
class Optimizer:
    """What takes the steps."""

    name: Algorithm = Algorithm.adamw
    """`adamw` keeps 8 bytes for each trained number. `adafactor` keeps rows and columns of the second moment alone, a few
    bytes for a thousand numbers; its learning rate is relative to the size of a matrix (3e-2 to 1e-1 do what AdamW's 1e-3
    to 3e-3 do)."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms, biases and embeddings have none."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""

    def __post_init__(self) -> None:
        _require(self.weight_decay >= 0, f"optimizer.weight_decay must be 0 or more, got {self.weight_decay}")
        for name in ("beta1", "beta2"):
            _require(
                0 <= getattr(self, name) < 1, f"optimizer.{name} must be from 0 to below 1, got {getattr(self, name)}"
            )


@dataclass(kw_only=True)
class EarlyStopping:
    """When training ends before its length."""

    patience: int = 3
    """Passes over the validation split, one after another, that may bring nothing better before training stops."""
    min_delta: float = 0.0
    """What a validation loss (nats a token) must be below the best one to count as better."""

    def __post_init__(self) -> None:
        _require(self.patience >= 1, f"early_stopping.patience must be at least 1, got {self.patience}")
        _require(self.min_delta >= 0, f"early_stopping.min_delta must be 0 or more, got {self.min_delta}")


ALL_LINEAR = "all-linear"
"""Stands for every linear layer but the output head."""


@dataclass(kw_only=True)
class Adapter:
    """LoRA: the base keeps its weights, and what is trained is a correction of low rank to each chosen matrix."""

    r: int = 8
    """Rank of a correction: r * (rows + columns) numbers are trained for a matrix of rows * columns."""
    alpha: int = 16
    """Scale of the corrections: they are multiplied by alpha / r."""
    dropout: float = 0.0
    """Share of a correction's inputs that is zeroed in training. What is drawn follows seed, step and rank, and so also the
    number of workers and the micro-batch."""
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Last names of the matrices that are corrected (`q_proj`, ...); `all-linear` alone: all but the output head."""
    modules_to_save: list[str] = field(default_factory=list)
    """Last names of modules that are trained in full beside the corrections: `embed_tokens` when tokens were added."""
    ensure_weight_tying: bool = False
    """Where the base shares one matrix between embedding and head, keep it shared when either stands in modules_to_save;
    otherwise the two part, and the exported model is larger by one of them."""
    merge: bool = True
    """Export a model that stands alone, its corrections added to the base's matrices. false: export the corrections and the
    identity of the base, which must then be there, unchanged, wherever the model is loaded."""
    quantize: bool = False
    """QLoRA: hold the base in 4 bits while the corrections are trained. Needs an NVIDIA GPU and bitsandbytes; no run has
    exercised it, so this release refuses it."""

    def __post_init__(self) -> None:
        for name in ("r", "alpha"):
            _require(getattr(self, name) >= 1, f"adapter.{name} must be at least 1, got {getattr(self, name)}")
        _require(0 <= self.dropout < 1, f"adapter.dropout must be from 0 to below 1, got {self.dropout}")
        _require(
            bool(self.target_modules), f"adapter.target_modules must name a module, got none; [{ALL_LINEAR}] is all"
        )
        _require(
            ALL_LINEAR not in self.target_modules or len(self.target_modules) == 1,
            f"adapter.target_modules must be [{ALL_LINEAR}] or names of modules, got both",
        )
        both = sorted(set(self.target_modules) & set(self.modules_to_save))
        _require(not both, f"adapter.modules_to_save must not repeat target_modules, got {', '.join(both)} in both")
        _require(
            not self.ensure_weight_tying or bool(self.modules_to_save),
            "adapter.ensure_weight_tying must be false without modules_to_save: nothing else parts tied matrices",
        )


class Weights(Enum):
    """Which weights of a run are its result."""

    last = "last"
    best = "best"


@dataclass(kw_only=True)
class Recipe(StageConfig):
    """How weights are optimised: what every training verb has in common. Exactly one length (max_steps, epochs, ...) is set;
    time is never a unit of training."""

    learning_rate: float = 1e-3
    """Peak of the schedule."""
    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate of each step."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """What takes the steps."""
    adapter: Adapter | None = None
    """LoRA: only corrections to the base's matrices are trained. null: all weights. Needs a base."""
    max_grad_norm: float = 1.0
    """Gradients with a larger global L2 norm are scaled down to it."""
    max_steps: int | None = None
    """Length of training in optimizer steps."""
    epochs: float | None = None
    """Length of training in passes over the training split, rounded up to whole steps."""
    precision: Precision = Precision.float32
    """Number format of matrix products in the training steps. bfloat16 is 1.3 to 1.5 times as fast on processors that
    multiply it (avx512_bf16, AMX) and slower on others; weights, loss, optimizer and validation stay float32."""
    validate_every: int = 100
    """Optimizer steps between passes over the whole validation split; the last step always has one. 0: only the last."""
    early_stopping: EarlyStopping | None = None
    """Ends training when the validation loss has stopped to fall; null: never. Needs validate_every."""
    export: Weights = Weights.last
    """`last`: the weights after the last step. `best`: those of the lowest validation loss (one that is lower by less than
    early_stopping.min_delta does not count); needs validate_every."""
    max_nonfinite_steps: int = 3
    """Steps with a non-finite loss or gradient are skipped on all workers together; one more than this stops training."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_grad_norm"):
            _require(getattr(self, name) > 0, f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("validate_every", "max_nonfinite_steps"):
            _require(getattr(self, name) >= 0, f"{name} must be 0 or more, got {getattr(self, name)}")
        known = [name for name in ("max_steps", "max_tokens", "epochs") if hasattr(self, name)]
        lengths = {name: getattr(self, name) for name in known if getattr(self, name) is not None}
        _require(
            len(lengths) == 1,
            f"set exactly one of {', '.join(known)}, got {lengths or 'none'}; set the others to null",
        )
        for name, value in lengths.items():
            _require(value > 0, f"{name} must be above 0, got {value}")
        for name, asked in (("early_stopping", self.early_stopping), ("export: best", self.export is Weights.best)):
            _require(not asked or self.validate_every > 0, f"{name} needs validate_every above 0, got 0: set it")


@dataclass(kw_only=True)
class TokenRecipe(Recipe):
    """Of next-token training on packed rows."""

    max_tokens: int | None = None
    """Length of training in tokens of packed rows, rounded up to whole steps."""
    tokens_per_step: int = 8192
    """Tokens of packed rows in one optimizer step over all workers, rounded to whole rows (at least one)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.tokens_per_step >= 1, f"tokens_per_step must be at least 1, got {self.tokens_per_step}")

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
    verb: str = "train"
    """The stage, as messages name its fields."""
    model: ModelConfig | None
    """Shape of a model to start from random weights; None when `base` is given."""
    base: Path | None
    """Directory of the checkpoint to start from."""
    base_digest: str = ""
    """Content digest of `base`, by which an exported adapter finds it again."""
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
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay, beside the best one where that is exported."""
    gradient_checkpointing: bool = False
    """Layers are computed again in the backward pass instead of kept."""
    peak_tflops: float | None = None
    """What one worker's device multiplies at most, in 10^12 operations a second."""
    sharded: bool = False
    """Weights, gradients and optimizer state are split over the workers."""
    collective_timeout_s: int = 120
    """Seconds that a rank waits for the others, where no launcher has joined them already."""


GOLDEN_PROMPTS = ("The ", "Return ", "import os\n", "def ")
"""Questions that a server must answer as the exporter did. Generic, so that any model has an opinion about them."""


def require_prompts(golden_prompts: list[str]) -> None:
    """ValueError unless each is a text."""
    _require(
        bool(golden_prompts) and all(golden_prompts),
        f"golden_prompts must be texts of at least one character, got {golden_prompts}",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
