"""Which rows a step trains on: a pure function of seed and step. Apart, because exact resume and any number of workers
rest on it: nothing is consumed, so nothing can be lost or seen twice after a restart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
RESOLUTION = 1 << 24
"""Weights are kept as integers that sum up to about this: shares are exact, and 2^38 draws do not overflow."""


@dataclass(frozen=True)
class Source:
    """The rows of one source of a mix, and how often it is drawn from beside the others."""

    name: str
    rows: Int64
    weight: int


def mix(names: Sequence[str], weights: Mapping[str, float]) -> tuple[Source, ...]:
    """The sources that the rows (each named by its source) are from, by name; none when there is but one, whose rows need
    no weighing. What `weights` does not name has weight 1."""
    found, source_of = np.unique(np.array(names, dtype=str), return_inverse=True)
    if len(found) < 2:
        return ()
    given = [float(weights.get(str(name), 1.0)) for name in found]
    return tuple(
        Source(str(name), np.flatnonzero(source_of == index), max(1, round(RESOLUTION * weight / sum(given))))
        for index, (name, weight) in enumerate(zip(found, given, strict=True))
    )


@dataclass(frozen=True)
class RowSampler:
    """An endless stream of rows, cut into steps of `rows_per_step`: epochs, each a permutation of all rows; or several such
    streams, one a source, from each of which its share is drawn."""

    rows: int
    rows_per_step: int
    total_rows: int
    """Where the stream ends; the last step takes what is left."""
    seed: int
    sources: tuple[Source, ...] = ()
    """Of a mix. After any number of draws each has had the share of them that its weight has of all weights, to within half a
    row for each source, however many rows it has itself."""
    _orders: dict[int, dict[int, Int64]] = field(default_factory=dict, repr=False, compare=False)
    """source -> epoch -> permutation, the newest two"""

    @property
    def steps(self) -> int:
        """Optimizer steps in all of training."""
        return -(-self.total_rows // self.rows_per_step)

    def state(self, step: int) -> dict[str, int]:
        """Where `step` begins: what a checkpoint records and a resumed run must agree with."""
        drawn = step * self.rows_per_step
        if not self.sources:
            epoch, cursor = divmod(drawn, self.rows)
            return {"seed": self.seed, "epoch": epoch, "cursor": cursor}
        state = {"seed": self.seed}
        for source, count in zip(self.sources, self._drawn(np.array([drawn]))[:, 0].tolist(), strict=True):
            epoch, cursor = divmod(count, len(source.rows))
            state |= {f"{source.name}/{name}": value for name, value in (("epoch", epoch), ("cursor", cursor))}
            state[f"{source.name}/weight"] = source.weight
        return state

    def step(self, step: int) -> Int64:
        """The rows of one step, for all workers together; a worker takes every world-size-th of them."""
        first = step * self.rows_per_step
        positions = np.arange(first, min(first + self.rows_per_step, self.total_rows))
        if not self.sources:
            return self._stream(0, self.rows, (), positions)
        before, after = self._drawn(positions), self._drawn(positions + 1)
        rows = np.empty(len(positions), np.int64)
        for index, source in enumerate(self.sources):
            mine = after[index] > before[index]
            if mine.any():
                rows[mine] = source.rows[self._stream(index, len(source.rows), (index,), before[index][mine])]
        return rows

    def realised(self) -> dict[str, int]:
        """How many rows of each source of a mix all of training takes."""
        counts = self._drawn(np.array([self.total_rows]))[:, 0].tolist() if self.sources else []
        return {source.name: count for source, count in zip(self.sources, counts, strict=True)}

    def _stream(self, index: int, rows: int, beside: tuple[int, ...], positions: Int64) -> Int64:
        """Entries at ascending positions of the endless stream of epochs over 0..rows-1."""
        epochs, cursors = np.divmod(positions, rows)
        parts = [self._order(index, rows, beside, int(e))[cursors[epochs == e]] for e in np.unique(epochs)]
        return np.concatenate(parts)

    def _order(self, index: int, rows: int, beside: tuple[int, ...], epoch: int) -> Int64:
        kept = self._orders.setdefault(index, {})
        if epoch not in kept:
            while len(kept) > 1:
                del kept[min(kept)]
            kept[epoch] = np.random.Generator(np.random.PCG64([self.seed, epoch, *beside])).permutation(rows)
        return kept[epoch]

    def _drawn(self, positions: Int64) -> Int64:
        """[sources, positions] how often each source was drawn from before a position: the first its rounded share of all
        draws, the second its rounded share of what is left, and so on. Each position adds one to exactly one of them."""
        left, weight = positions, sum(source.weight for source in self.sources)
        counts = []
        for source in self.sources:
            mine = (2 * left * source.weight + weight) // (2 * weight)
            counts.append(mine)
            left, weight = left - mine, weight - source.weight
        return np.stack(counts)
