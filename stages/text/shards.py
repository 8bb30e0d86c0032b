"""Writes the Parquet files of an artifact: fixed rows a shard, fixed names. Apart, because equal rows must be equal bytes.

Nothing here depends on how many blocks, workers or hosts made the rows, and a shard appears under its name only when it
is whole: tasks that Ray runs twice replace a file by an equal one.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow
import pyarrow.parquet

from stages.text.record import FIELDS

ROWS_PER_SHARD = 10_000
ROWS_PER_GROUP = 1_000
CHARACTERS_PER_GROUP = 8_000_000
"""A row group ends at whichever comes first, so that readers hold little however long the rows are."""

ROWS_SCHEMA = pyarrow.schema([pyarrow.field(name, pyarrow.string(), nullable=False) for name in FIELDS])
"""The columns of `stages.text.record.Record`."""
CORPUS_SCHEMA = ROWS_SCHEMA.append(pyarrow.field("split", pyarrow.string(), nullable=False))
DROPPED_SCHEMA = pyarrow.schema(
    [pyarrow.field(name, pyarrow.string(), nullable=False) for name in ("id", "reason", "detail")]
)


def shard_name(index: int) -> str:
    return f"part-{index:05d}.parquet"


class ShardWriter:
    """Rows of strings, one after the other, into `part-00000.parquet`, ...; leave the `with` block to finish the last.

    A shard holds `rows_per_shard` rows (None: as many as come); without a row there is no shard.
    """

    def __init__(
        self,
        directory: Path,
        schema: pyarrow.Schema,
        first: int = 0,
        rows_per_shard: int | None = ROWS_PER_SHARD,
        compression: str = "zstd",
    ) -> None:
        self.directory, self.schema, self.rows_per_shard = directory, schema, rows_per_shard
        self._compression = compression
        self._shard, self._rows_in_shard, self._characters = first, 0, 0
        self._columns: list[list[str]] = [[] for _ in schema.names]
        self._writer: pyarrow.parquet.ParquetWriter | None = None

    def write(self, *values: str) -> None:
        """Add one row, its values in the order of the schema."""
        if self._rows_in_shard == self.rows_per_shard:
            self._close()
            self._shard, self._rows_in_shard = self._shard + 1, 0
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)
        self._rows_in_shard += 1
        self._characters += sum(map(len, values))
        if len(self._columns[0]) == ROWS_PER_GROUP or self._characters >= CHARACTERS_PER_GROUP:
            self._flush()

    def write_table(self, table: pyarrow.Table) -> None:
        """Add a whole row group to the shard, however many rows it has."""
        self._flush()
        self._write(table)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self._close()
        elif self._writer is not None:
            self._writer.close()
            self._partial.unlink()

    @property
    def _partial(self) -> Path:
        return _partial(self.directory / shard_name(self._shard))

    def _flush(self) -> None:
        if self._columns[0]:
            self._write(pyarrow.table(self._columns, schema=self.schema))
        self._columns = [[] for _ in self.schema.names]
        self._characters = 0

    def _write(self, table: pyarrow.Table) -> None:
        if self._writer is None:
            # Not its parents: a worker that outlives an interrupted attempt must not make the attempt's directory again.
            self.directory.mkdir(exist_ok=True)
            self._writer = pyarrow.parquet.ParquetWriter(self._partial, self.schema, compression=self._compression)
        self._writer.write_table(table)

    def _close(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()
            self._partial.replace(self.directory / shard_name(self._shard))
            self._writer = None


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.partial")


def write_shard(path: Path, table: pyarrow.Table, compression: str = "zstd") -> None:
    """One whole shard at once."""
    path.parent.mkdir(exist_ok=True)
    partial = _partial(path)
    pyarrow.parquet.write_table(table, partial, compression=compression)
    partial.replace(path)


def remove_partial(directory: Path) -> None:
    """Remove what a killed worker left beside the whole shards."""
    for stray in directory.rglob("*.partial"):
        stray.unlink()


@dataclass(frozen=True)
class Table:
    """The shards of one table of an artifact, and how many rows each has."""

    shards: list[Path]
    counts: list[int]

    @classmethod
    def of(cls, shards: list[Path]) -> "Table":
        """Rows are counted from the shards' footers alone."""
        return cls(shards, [pyarrow.parquet.read_metadata(shard).num_rows for shard in shards])

    @property
    def total(self) -> int:
        return sum(self.counts)

    def slices(self, first: int, last: int, columns: list[str] | None = None) -> Iterator[pyarrow.Table]:
        """Rows first..last-1 of the whole, at most a row group at a time; of all columns or of these."""
        position = 0
        for shard, count in zip(self.shards, self.counts, strict=True):
            if position < last and position + count > first:
                file = pyarrow.parquet.ParquetFile(shard)
                at = position
                for group in range(file.num_row_groups):
                    size = file.metadata.row_group(group).num_rows
                    low, high = max(first - at, 0), min(last - at, size)
                    if low < high:
                        yield file.read_row_group(group, columns=columns).slice(low, high - low)
                    at += size
            position += count
