"""Reads a Corpus in id order without holding it. Apart, because tokenising and evaluating must read the same rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pyarrow.parquet

from stages.artifacts import ArtifactError
from stages.text.record import FIELDS, Record

TRAIN = "train"
VALIDATION = "validation"
SPLITS = (TRAIN, VALIDATION)


def shards(directory: Path, name: str = "rows") -> list[Path]:
    """The part files of one table of an artifact, in their order. ArtifactError when there are none."""
    found = sorted((directory / name).glob("part-*.parquet"))
    if not found:
        raise ArtifactError(f"{directory / name}: no part-*.parquet here")
    return found


def documents(directory: Path, split: str) -> Iterator[tuple[str, str, str]]:
    """(id, prompt, text) of one split of a Corpus, in id order; a few hundred rows in memory at a time."""
    yield from _columns(directory, split, ("id", "prompt", "text"))


def records(directory: Path, split: str) -> Iterator[Record]:
    """The whole rows of one split of a Corpus, in id order."""
    for values in _columns(directory, split, FIELDS):
        yield Record(*values)


def _columns(directory: Path, split: str, names: tuple[str, ...]) -> Iterator[Any]:
    for shard in shards(directory):
        file = pyarrow.parquet.ParquetFile(shard)
        for batch in file.iter_batches(batch_size=512, columns=[*names, "split"]):
            table = batch.filter(pyarrow.dataset.field("split") == split)
            yield from zip(*(table.column(name).to_pylist() for name in names), strict=True)
