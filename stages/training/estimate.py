"""What a training run will need, before it starts: memory of one worker and seconds of the whole. Plain arithmetic on a
model's shape, without torch, so that a plan can show it in milliseconds; the run compares itself with it at its end.

Memory of a worker = process + weights + gradients + optimizer + max(activations, reloaded export) + data:

    weights      4 bytes a number (float32, whatever the precision of products)
    gradients    4 bytes a trained number
    optimizer    adamw 8 bytes a trained number; adafactor rows and columns, and two buffers of the largest matrix
    activations  a layer keeps 6 * hidden + 4 * heads * head_dim + 4 * intermediate numbers a token, and one mask row (length
                 numbers) where documents are packed; with gradient checkpointing hidden numbers a token, and one layer whole.
                 4 bytes a number, 2.7 in bfloat16 (measured on Llama). Logits: 3 * vocabulary * 4 bytes a token. Validation
                 keeps one layer and logits, of a micro-batch that may be larger than what a step has for one worker
    export       the reloaded model, 4 bytes a number
    data         8 bytes a token of both splits

Time = steps * operations of a step / (speed of one worker * workers); operations as in `flops_per_token`, a third more with
gradient checkpointing. Validation, checkpoints and the start are not in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stages.contract import ResourcesUnavailable
from stages.training.config import ALL_LINEAR, Adapter

PROCESS_BYTES = 550 * 10**6
"""Python with torch and transformers: 480 MB before a model is there, the rest on its first step (measured)."""
CPU_FLOPS = 5e10
"""Operations a second that training gets from one thread of a processor, where nothing better is known (measured on an EPYC:
two threads train 12,500 tokens a second of 8.0 million operations each; an older or a busy processor gets a fraction)."""
ADAPTER_HOLES = 1.5
"""Activations beside an adapter, at most: what its small products free between what is kept is not given back. Measured on a
model of 135 M numbers in rows of 256: 1.0 times with one row and with two, 1.5 times with four."""
GPU_SHARE = 0.4
"""Share of a GPU's peak that training is taken to get: published runs of this size reach 0.33 to 0.46."""
HEADROOM = 0.9
"""Share of the free memory that a run may plan with."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What of an architecture decides its size."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], vocabulary: int | None = None) -> "ModelShape | None":
        """From a `config.json` in the names of Llama; None when it has others. `vocabulary` replaces the one that it says."""
        try:
            hidden, heads = config["hidden_size"], config["num_attention_heads"]
            return cls(
                hidden=hidden,
                intermediate=config["intermediate_size"],
                layers=config["num_hidden_layers"],
                heads=heads,
                key_value_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or hidden // heads,
                vocabulary=max(vocabulary or 0, config.get("vocab_size") or 0),
                tied=bool(config.get("tie_word_embeddings", False)),
            )
        except (KeyError, TypeError):
            return None

    @property
    def block_matrices(self) -> int:
        """Numbers in the matrices of all layers."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.key_value_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def multiplied(self) -> int:
        """Numbers that each token is multiplied with: all matrices but the embedding, which is looked up."""
        return self.block_matrices + self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All numbers, a shared matrix once; biases are left out."""
        embedding = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.block_matrices + embedding + (2 * self.layers + 1) * self.hidden


def flops_per_token(shape: ModelShape, length: int, trained_share: float = 1.0) -> float:
    """Floating point operations of one token, forward and backward: 6 for each number that it is multiplied with (2 forward,
    2 for gradients of what came in, 2 for gradients of weights where these are trained), and 12 * layers * heads * head_dim *
    length of attention. PaLM (2022), appendix B: attention counted in full, though half is masked; recomputation not counted."""
    attention = 12 * shape.layers * shape.heads * shape.head_dim * length
    return (4 + 2 * trained_share) * shape.multiplied + attention


def utilisation(tokens_per_second: float, flops: float, peak_flops: float) -> float:
    """Model FLOPs utilisation (MFU) of one device: operations that the model needed over what the device does at most."""
    return tokens_per_second * flops / peak_flops


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes and seconds of one run."""

    process: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    export: int
    data: int
    seconds: float
    workers: int = 1

    @property
    def model(self) -> int:
        """Bytes that the run adds to its process."""
        fixed = self.weights + self.gradients + self.optimizer + self.data
        return fixed + max(self.activations, self.export)

    @property
    def memory(self) -> int:
        """Bytes of one worker at its peak."""
        return self.process + self.model

    def text(self) -> str:
        """One line: the whole and its parts."""
        parts = ("process", "weights", "gradients", "optimizer", "activations", "data")
        named = ", ".join(f"{name} {gigabytes(size)}" for name in parts if (size := getattr(self, name)))
        time = f" and {duration(self.seconds)}" if self.seconds else ""
        return f"about {gigabytes(self.memory)} a worker ({named}){time}"


def training(
    shape: ModelShape,
    *,
    length: int,
    micro_batch_rows: int,
    positions: int,
    data_tokens: int,
    step_rows: int | None = None,
    validation_rows: int | None = None,
    workers: int = 1,
    sharded: bool = False,
    trained: int | None = None,
    lean_optimizer: bool = False,
    bfloat16: bool = False,
    gradient_checkpointing: bool = False,
    reference_pass: bool = False,
    frozen_copy: bool = False,
    flops_per_second: float = CPU_FLOPS,
) -> Estimate:
    """A run over `positions` tokens (padding, which is nearly all left away, is none) in rows of `length`.

    `trained`: numbers with a gradient (None: all); `step_rows`, `validation_rows`: what one worker has in a step, and in a pass
    over the validation split, where that is less than a micro-batch; `data_tokens`: tokens of both splits; `reference_pass`: the
    data go through a reference too, which is a second model where `frozen_copy`; `sharded`: weights, gradients and optimizer state
    are split over the workers, and one layer, with embedding and head, is gathered at a time; `flops_per_second`: what one worker gets."""
    total = shape.parameters
    trained = total if trained is None else trained
    width = 6 * shape.hidden + 4 * shape.heads * shape.head_dim + 4 * shape.intermediate + length
    kept = shape.layers * shape.hidden + width if gradient_checkpointing else shape.layers * width
    number = 2.7 if bfloat16 else 4.0
    tokens, validated = (length * min(micro_batch_rows, n or micro_batch_rows) for n in (step_rows, validation_rows))
    activations = max(tokens * (number * kept + 12 * shape.vocabulary), validated * (4 * width + 12 * shape.vocabulary))
    largest = max(shape.vocabulary, shape.intermediate) * shape.hidden
    rows_and_columns = trained // max(shape.hidden, 1) * 2
    if trained < total:
        activations *= ADAPTER_HOLES
    parts = workers if sharded else 1
    gathered = 8 * (shape.block_matrices // shape.layers + total - shape.block_matrices) if sharded else 0
    operations = flops_per_token(shape, length, min(1.0, trained / total))
    if gradient_checkpointing:
        operations += flops_per_token(shape, length) / 3
    if reference_pass:
        operations += flops_per_token(shape, length) / 3
    return Estimate(
        process=PROCESS_BYTES,
        weights=4 * total // parts + gathered + (4 * total if frozen_copy else 0),
        gradients=4 * trained // parts,
        optimizer=4 * (rows_and_columns + 2 * largest) if lean_optimizer else 8 * trained // parts,
        activations=int(activations),
        export=4 * total,
        data=8 * data_tokens,
        seconds=positions * operations / (flops_per_second * workers),
        workers=workers,
    )


def adapter_numbers(shape: ModelShape, adapter: Adapter) -> int:
    """What a LoRA adapter trains, by the names of Llama's modules; others count as none."""
    queries, keys = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    sides = {
        "q_proj": shape.hidden + queries,
        "k_proj": shape.hidden + keys,
        "v_proj": shape.hidden + keys,
        "o_proj": queries + shape.hidden,
        "gate_proj": shape.hidden + shape.intermediate,
        "up_proj": shape.hidden + shape.intermediate,
        "down_proj": shape.intermediate + shape.hidden,
    }
    chosen = list(sides) if ALL_LINEAR in adapter.target_modules else adapter.target_modules
    corrections = shape.layers * adapter.r * sum(sides.get(name, 0) for name in chosen)
    whole = {"embed_tokens", "lm_head"} & set(adapter.modules_to_save)
    return corrections + len(whole) * shape.vocabulary * shape.hidden


def require_room(estimate: Estimate, there: int, workers_here: int = 1, *, whole: bool = False) -> None:
    """ResourcesUnavailable when the workers of one machine need more than is `there` (free, or the `whole` machine), with what
    would help most."""
    wanted = estimate.memory * workers_here
    if wanted <= HEADROOM * there:
        return
    big = max(("activations", "optimizer", "weights"), key=lambda name: int(getattr(estimate, name)))
    ways = {
        "activations": "lower resources.micro_batch_rows or set resources.gradient_checkpointing=true",
        "optimizer": "set optimizer.name=adafactor, or train an adapter",
        "weights": "train an adapter of the base, lower resources.workers, or take a smaller model",
    }
    way, fitting = ways[big], int(HEADROOM * there // estimate.memory)
    if 0 < fitting < workers_here:
        way = f"set resources.workers <= {fitting}, or {way}"
    raise ResourcesUnavailable(
        f"training needs {estimate.text()}; {workers_here} here need {gigabytes(wanted)}, "
        f"{gigabytes(there)} are {'there' if whole else 'free'} (of which {HEADROOM:.0%} may be planned with): {way}"
    )


def gigabytes(count: float) -> str:
    """GB, or MB or kB where that reads better."""
    if count < 1e6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
