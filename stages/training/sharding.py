"""Weights, gradients and optimizer state split over the workers (FSDP2). Apart, because the loop is the same with it and
without: each place that differs is a line that calls this.

A layer's weights are gathered while it computes and let go again, so every worker must make the same forward and backward
passes: one that has fewer batches makes weightless ones. A checkpoint holds one file of each worker, in PyTorch's distributed
format, which any number of workers can read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from stages.contract import StageError
from stages.training import adapters
from stages.training.config import Algorithm, Recipe
from stages.training.world import World

SHARDS = "shards"
"""Directory of a checkpoint in which the workers' files are."""
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)


def require(recipe: Recipe) -> None:
    """StageError for what cannot be split."""
    if recipe.optimizer.name is Algorithm.adafactor:
        raise StageError(
            "optimizer.name=adafactor keeps rows and columns of whole matrices, which resources.sharding=full splits; set "
            "optimizer.name=adamw, or resources.sharding=none"
        )


def split(model: Any, world: World) -> None:
    """Split `model` in place, layer by layer; what is in no layer (embeddings, the head) is one part more."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    whole = model.get_base_model() if adapters.is_attached(model) else model
    layers = set(whole._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


@contextmanager
def accumulating(model: Any, last: bool) -> Iterator[None]:
    """Around a backward pass: gradients are summed over the workers in the last one of a step alone."""
    model.set_requires_gradient_sync(last)
    yield
    model.set_requires_gradient_sync(True)


def save(directory: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Write this worker's part of what is trained. All workers call it."""
    weights, moments = get_state_dict(model, optimizer, options=TRAINED)
    distributed_checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=directory)


def load(directory: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Read what this worker holds of it now, however many wrote it. All workers call it."""
    weights, moments = get_state_dict(model, optimizer, options=TRAINED)
    state = {"model": weights, "optimizer": moments}
    distributed_checkpoint.load(state, checkpoint_id=directory)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=TRAINED
    )


def whole(model: Any) -> dict[str, torch.Tensor]:
    """All weights, on worker 0's processor; {} on the others. All workers call it."""
    found: dict[str, torch.Tensor] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return found


def put(model: Any, weights: dict[str, torch.Tensor]) -> Any:
    """A whole model with what `whole` gave. StageError when that is of another model."""
    missing, unexpected = model.load_state_dict(weights, strict=False)
    base = model.get_base_model() if adapters.is_attached(model) else model
    tied = set(getattr(base, "_tied_weights_keys", None) or ())
    lacking = [name for name in missing if not any(name.endswith(key) for key in tied)]
    if lacking or unexpected:
        raise StageError(f"the split model has other weights than the whole: {[*lacking, *unexpected][0]}")
    return model
