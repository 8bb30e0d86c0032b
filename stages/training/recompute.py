"""Gradient checkpointing: a layer's inner values are computed again in the backward pass instead of kept. Apart, because a
layer that is computed twice takes another way through the library, on which documents must be proved to stay apart again."""

from typing import Any

from stages.contract import StageError
from stages.training import model as models


def enable(model: Any) -> None:
    """StageError when the model class cannot, or packed documents see each other in this mode."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise StageError(
            f"{type(model).__name__} cannot compute its layers again; set resources.gradient_checkpointing=false and lower "
            "resources.micro_batch_rows instead"
        )
    # Not re-entrant: the re-entrant way needs inputs with gradients, which an adapter's frozen embedding does not give.
    model.activation_checkpointing_enable({"use_reentrant": False})
    models.require_isolation(model, model.config.vocab_size)
