"""Which rows a step trains on: a pure function of seed and step. Apart, because exact resume and any number of workers
rest on it: nothing is consumed, so nothing can be lost or seen twice after a restart."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowSampler:
    """An endless stream of epochs, each a permutation of all rows, cut into steps of `rows_per_step`."""

    rows: int
    rows_per_step: int
    total_rows: int
    """Where the stream ends; the last step takes what is left."""
    seed: int

    @property
    def steps(self) -> int:
        """Optimizer steps in all of training."""
        return -(-self.total_rows // self.rows_per_step)

    def state(self, step: int) -> dict[str, int]:
        """Where `step` begins: what a checkpoint records and a resumed run must agree with."""
        epoch, cursor = divmod(step * self.rows_per_step, self.rows)
        return {"seed": self.seed, "epoch": epoch, "cursor": cursor}

    def step(self, step: int) -> Int64:
        """The rows of one step, for all workers together; a worker takes every world-size-th of them."""
        first = step * self.rows_per_step
        positions = np.arange(first, min(first + self.rows_per_step, self.total_rows))
        epochs, cursors = np.divmod(positions, self.rows)
        parts = [_order(self.rows, self.seed, int(e))[cursors[epochs == e]] for e in np.unique(epochs)]
        return np.concatenate(parts)


@lru_cache(maxsize=2)
def _order(rows: int, seed: int, epoch: int) -> Int64:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(rows)
