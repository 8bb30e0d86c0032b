"""What the first numbers of a run must look like, before hours are spent. Apart, because each stands for a mistake that
training itself does not notice: nothing to learn, a model that is broken, labels that are shifted."""

import math
from typing import Any

from stages.contract import StageError
from stages.training.config import Recipe, Weights
from stages.training.stopping import Best

TOLERANCE = 0.5
"""Nats by which the loss of random weights may miss what it should be; a shift or a mask that is wrong costs several."""


ROUNDING = 0.02
"""Nats by which sums of log-probabilities may move the first loss of a policy that equals its reference."""


def require_something_to_learn(weight: int) -> None:
    """StageError when no row has anything that the loss is taken on."""
    if weight < 1:
        raise StageError(
            "no token of the training split is supervised: its labels are all masked; look at the data set's preview and "
            "at what the tokenize stage takes the loss on (loss_on)"
        )


def require_first_loss(loss: float) -> None:
    """StageError when the loss before any step is no number to go down from."""
    if not math.isfinite(loss):
        raise StageError(
            f"the loss of the first step is {loss} before any weight has changed: the base's weights are broken or its "
            "numbers too large for the precision; check the base's own loss, or set precision=float32"
        )
    if loss == 0:
        raise StageError(
            "the loss of the first step is exactly 0 though tokens are supervised: the model gives every label "
            "probability 1, so there is nothing to learn; look at the data set's preview"
        )


def require_last_loss(step: int, loss: float, recipe: Recipe, best: Best) -> None:
    """StageError when the weights that are to leave have a validation loss that is no number."""
    if not math.isfinite(loss) and not (recipe.export is Weights.best and best.step):
        raise StageError(
            f"step {step}: the validation loss of the last weights is {loss}, so they are not exported; lower learning_rate (now "
            f"{recipe.learning_rate:g}), or set export=best and validate_every to keep the weights of a better step"
        )


def unlike(loss: float, untrained: float | None) -> str | None:
    """A warning when the loss of the first step is not what a policy has that has learned nothing."""
    if untrained is None or abs(loss - untrained) <= ROUNDING:
        return None
    return (
        f"the loss of the first step is {loss:.4f}, a policy that equals its reference has {untrained:.4f}: the reference is of other "
        "weights or another precision (stored log-probabilities are float32's)"
    )


def unexpected(model: Any, loss: float) -> str | None:
    """A warning when random weights do not guess: their loss should be the entropy of a uniform guess over the V tokens,
    ln(V), and what the spread of the logits adds, which is half their variance (final norm: unit size times width times the
    variance of the head's weights)."""
    head = model.get_output_embeddings().weight
    head = head.full_tensor() if hasattr(head, "full_tensor") else head  # of a split model
    spread = head.shape[1] * float(head.detach().float().var()) / 2
    uniform = math.log(model.config.vocab_size)
    if abs(loss - uniform - spread) <= TOLERANCE + spread:
        return None
    return (
        f"the loss of the first step is {loss:.2f}, random weights guess with {uniform + spread:.2f} (ln of "
        f"{model.config.vocab_size} tokens): labels may be shifted or masked wrongly, or model.initializer_range is too large"
    )
