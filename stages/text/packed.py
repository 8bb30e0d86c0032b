"""Reads packed sequences into NumPy. Apart, because training and evaluation must see the very same arrays."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet

from stages.artifacts import ArtifactError
from stages.text.corpus import shards
from stages.text.packing import IGNORED

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackedSplit:
    """One split of a TokenDataset. A row is one packed sequence; documents in it never see each other."""

    input_ids: Int32
    """[rows, sequence_length]"""
    labels: Int32
    """[rows, sequence_length]: the id at the same position (not shifted), or -100 where no loss is taken."""
    document_starts: list[Int32]
    """For each row the positions at which a document begins, ascending from 0; padding is a document of its own."""
    sources: list[str]
    """For each row the source that all its documents are from."""

    @classmethod
    def read(cls, directory: Path, split: str) -> "PackedSplit":
        """Read `split` ("train" or "validation") of the TokenDataset in `directory`. ArtifactError when it is none."""
        columns = ["input_ids", "labels", "document_starts", "source"]
        table = pyarrow.concat_tables(pyarrow.parquet.read_table(s, columns=columns) for s in shards(directory, split))
        starts = table.column("document_starts").combine_chunks()
        return cls(
            input_ids=_matrix(table.column("input_ids"), directory, split),
            labels=_matrix(table.column("labels"), directory, split),
            sources=table.column("source").to_pylist(),
            document_starts=np.split(starts.flatten().to_numpy(), starts.offsets.to_numpy()[1:-1]),
        )

    def __len__(self) -> int:
        return len(self.input_ids)

    def take(self, rows: Int64) -> "PackedSplit":
        """Some of the rows."""
        starts, sources = ([values[row] for row in rows] for values in (self.document_starts, self.sources))
        return PackedSplit(self.input_ids[rows], self.labels[rows], starts, sources)

    @cached_property
    def lengths(self) -> Int64:
        """[rows] tokens before the padding. Padding is the last document of a row where that is one id again and again and
        nothing of it is predicted (a last document of one token looks the same, and is counted as padding)."""
        counts = np.full(len(self), self.input_ids.shape[1], dtype=np.int64)
        for row, starts in enumerate(self.document_starts):
            ids, labels = self.input_ids[row, starts[-1] :], self.labels[row, starts[-1] :]
            if len(starts) > 1 and (ids == ids[0]).all() and (labels == IGNORED).all():
                counts[row] = starts[-1]
        return counts

    def trimmed(self, rows: Int64) -> tuple[Int32, Int32, Int32]:
        """`input_ids`, `labels` and positions of these rows, [rows, the longest of them]. Positions restart at 0 with each document,
        which is what isolates it. Those of padding go on: nothing looks ahead, so nothing sees it, and where each row is one
        document no mask is needed at all."""
        width = int(self.lengths[rows].max())
        starts = [self.document_starts[row][self.document_starts[row] < self.lengths[row]] for row in rows]
        places = [positions(of_row, width) for of_row in starts]
        return self.input_ids[rows, :width], self.labels[rows, :width], np.stack(places)


def positions(document_starts: Int32, length: int) -> Int32:
    """[length] int32: distance of each position from the start of its document."""
    sizes = np.diff(np.append(document_starts, length))
    return (np.arange(length) - np.repeat(document_starts, sizes)).astype(np.int32)


def _matrix(column: pyarrow.ChunkedArray, directory: Path, split: str) -> Int32:
    array = column.combine_chunks()
    width = len(array[0]) if len(array) else 0
    values: Int32 = array.flatten().to_numpy(zero_copy_only=False)
    if len(values) != len(array) * width:
        raise ArtifactError(f"{directory / split}: rows are not all {width} tokens long")
    return values.reshape(len(array), width)
