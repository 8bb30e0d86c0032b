"""The best validation loss so far and when to give up. Apart, because it is a small state that a checkpoint carries: a resumed
run must stop at the step at which the undisturbed one does."""

import math
from dataclasses import dataclass

from stages.training.config import EarlyStopping


@dataclass
class Best:
    """What the passes over the validation split have shown."""

    loss: float = math.inf
    step: int = 0
    """Optimizer steps taken when it was found."""
    worse: int = 0
    """Passes since then."""

    def see(self, step: int, loss: float, settings: EarlyStopping | None) -> bool:
        """Take in a validation loss; whether it is the best by more than what is asked for. One that is not finite never is."""
        if loss < self.loss - (settings.min_delta if settings else 0.0):
            self.loss, self.step, self.worse = loss, step, 0
            return True
        self.worse += 1
        return False

    def stops(self, settings: EarlyStopping | None) -> bool:
        """Whether enough passes brought nothing better."""
        return settings is not None and self.worse >= settings.patience
