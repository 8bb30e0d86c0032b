"""The estimate of a training run that is only planned: from results that are stored, and from what the config says of those
that are not made yet. Apart from `forecast`, which has model and data in its hands; this loads no library and no data.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stages.contract import StageConfig
from stages.training import estimate
from stages.training.config import Algorithm, ModelConfig, Precision, Recipe, TokenRecipe
from stages.training.estimate import Estimate, ModelShape
from stages.training.pair_recipe import PairRecipe, ReferenceFrom
from stages.training.resources import Launcher, Sharding, TrainResources, torch_knows_gpus

BASE, SUMMARY = "config.json", "summary.json"


@dataclass(frozen=True)
class Given:
    """One input of a planned stage."""

    cfg: StageConfig
    """The config of the stage that makes it."""
    read: Callable[[str], dict[str, Any] | None]
    """A JSON file of it; None when it is not made yet, or has no such file."""


def foreseen(
    recipe: Recipe, model: ModelConfig | None, resources: TrainResources, inputs: Mapping[str, Given]
) -> Estimate | None:
    """What the run will need; None when too little is known. The time is 0 where the number of rows, or the speed of a GPU,
    is not known."""
    data = inputs["dataset"]
    facts = data.read(SUMMARY) or {}
    length = facts.get("sequence_length") or getattr(data.cfg, "sequence_length", None)
    shape = _shape(model, inputs, facts.get("vocab_size") or getattr(data.cfg, "vocab_size", None))
    if shape is None or not length:
        return None
    train = facts.get("train", {})
    rows: int | None = train.get("rows", train.get("pairs"))
    sequences = 2 if isinstance(recipe, PairRecipe) else 1
    positions = _rows_trained(recipe, rows, length) * sequences * _mean_length(train, length)
    reference = _reference(recipe, facts)
    adapter = recipe.adapter
    workers = 1 if resources.launcher is Launcher.inline else resources.workers
    return estimate.training(
        shape,
        length=length,
        micro_batch_rows=resources.micro_batch_rows * sequences,
        positions=int(positions) if _speed(resources) else 0,
        step_rows=-(-_rows_per_step(recipe, length) // workers) * sequences,
        validation_rows=_validation_rows(facts, workers) * sequences or None,
        data_tokens=(rows or 0) * sequences * length,
        workers=workers,
        sharded=resources.sharding is Sharding.full,
        trained=None if adapter is None else estimate.adapter_numbers(shape, adapter),
        lean_optimizer=recipe.optimizer.name is Algorithm.adafactor,
        bfloat16=recipe.precision is Precision.bfloat16,
        gradient_checkpointing=resources.gradient_checkpointing,
        reference_pass=reference in (ReferenceFrom.adapter_off, ReferenceFrom.copy),
        frozen_copy=reference is ReferenceFrom.copy,
        flops_per_second=_speed(resources) or 1.0,
    )


def _shape(model: ModelConfig | None, inputs: Mapping[str, Given], vocabulary: int | None) -> ModelShape | None:
    if model is not None:
        return ModelShape.of(asdict(model), vocabulary) if vocabulary else None
    found = inputs["base"].read(BASE) if "base" in inputs else None
    return ModelShape.of(found, vocabulary) if found else None


def _rows_per_step(recipe: Recipe, length: int) -> int:
    assert isinstance(recipe, TokenRecipe | PairRecipe)
    return recipe.rows_per_step(length) if isinstance(recipe, TokenRecipe) else recipe.pairs_per_step


def _validation_rows(facts: Mapping[str, Any], workers: int) -> int:
    """What one worker has of them; 0 when that is not known."""
    split = facts.get("validation", {})
    return -(-int(split.get("rows", split.get("pairs", 0))) // workers)


def _rows_trained(recipe: Recipe, rows: int | None, length: int) -> int:
    """0 when it depends on data that are not made yet."""
    if rows is None and recipe.epochs is not None:
        return 0
    assert isinstance(recipe, TokenRecipe | PairRecipe)
    return recipe.total_rows(rows or 0, length) if isinstance(recipe, TokenRecipe) else recipe.total_rows(rows or 0)


def _mean_length(train: Mapping[str, Any], length: int) -> float:
    """Of the sequences of a split, padding left away as training does; all of `length` where that is not known."""
    tokens, count = train.get("tokens", 0), train.get("rows", 0)
    if "pairs" in train:  # each reads its prompt twice
        counted = ("prompt_tokens", "prompt_tokens", "chosen_tokens", "rejected_tokens")
        tokens, count = sum(train.get(name, 0) for name in counted), 2 * train["pairs"]
    return tokens / count if tokens and count else float(length)


def _reference(recipe: Recipe, facts: Mapping[str, Any]) -> ReferenceFrom | None:
    """Where a preference run will take its reference from, as `stages.training.preferences` chooses."""
    if not isinstance(recipe, PairRecipe):
        return None
    if recipe.reference is not None:
        return recipe.reference
    if facts.get("reference_logprobs"):
        return ReferenceFrom.columns
    return ReferenceFrom.adapter_off if recipe.adapter is not None else ReferenceFrom.copy


def _speed(resources: TrainResources) -> float | None:
    """Operations a second of one worker; None where a GPU trains whose peak nobody has stated."""
    if resources.peak_tflops is not None:
        return estimate.GPU_SHARE * resources.peak_tflops * 1e12
    return None if on_gpu(resources) else estimate.CPU_FLOPS * resources.threads_per_worker


def on_gpu(resources: TrainResources) -> bool:
    """Whether workers of this machine will compute on an NVIDIA device: its memory is another one than what the system tells
    of, and its speed is not known here."""
    if resources.launcher is Launcher.ray:
        return resources.placed(float(_has_gpu())).gpus_per_worker == 1
    return _has_gpu() and torch_knows_gpus()


def _has_gpu() -> bool:
    return Path("/dev/nvidia0").exists()
