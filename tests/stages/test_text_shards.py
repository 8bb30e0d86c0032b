"""Shards on disk: fixed sizes and names, whole or absent, read in ranges; and the two readers that others build on."""

from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from stages.artifacts import ArtifactError
from stages.text.corpus import documents, records
from stages.text.packed import PackedSplit, positions
from stages.text.record import Record
from stages.text.shards import CORPUS_SCHEMA, DROPPED_SCHEMA, ShardWriter, Table, remove_partial, write_shard


def write(directory: Path, rows: int, rows_per_shard: int | None) -> list[Path]:
    with ShardWriter(directory, DROPPED_SCHEMA, rows_per_shard=rows_per_shard) as writer:
        for index in range(rows):
            writer.write(f"{index:06d}", "x", "")
    return sorted(directory.glob("*")) if directory.exists() else []


def test_a_shard_holds_so_many_rows_and_the_last_one_the_rest(tmp_path: Path) -> None:
    shards = write(tmp_path / "a", 2_500, 1_200)
    assert [shard.name for shard in shards] == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    assert Table.of(shards).counts == [1_200, 1_200, 100]
    assert Table.of(write(tmp_path / "b", 2_500, None)).counts == [2_500]
    assert Table.of(write(tmp_path / "c", 2_400, 1_200)).counts == [1_200, 1_200]
    assert write(tmp_path / "d", 0, 1_200) == []


@pytest.mark.parametrize(("first", "last"), [(0, 2_500), (0, 1), (1_199, 1_201), (999, 2_300), (2_499, 2_500), (7, 7)])
def test_a_range_of_rows_is_read_across_shards_and_row_groups(tmp_path: Path, first: int, last: int) -> None:
    table = Table.of(write(tmp_path, 2_500, 1_200))
    found = [row for part in table.slices(first, last) for row in part.column("id").to_pylist()]
    assert found == [f"{index:06d}" for index in range(first, last)]
    assert table.total == 2_500


def test_long_rows_make_small_row_groups(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, DROPPED_SCHEMA) as writer:
        for index in range(5):
            writer.write(str(index), "x" * 5_000_000, "")
    assert pyarrow.parquet.read_metadata(tmp_path / "part-00000.parquet").num_row_groups == 3


def test_a_writer_that_fails_leaves_no_half_shard(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ShardWriter(tmp_path, DROPPED_SCHEMA) as writer:
        for _ in range(3_000):
            writer.write("a", "b", "c")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "part-00000.parquet.17.partial").write_bytes(b"killed")
    write_shard(tmp_path / "part-00000.parquet", pyarrow.table({"a": [1]}))
    remove_partial(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["part-00000.parquet"]


def test_documents_of_one_split_come_in_id_order(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no part-\*\.parquet"):
        list(documents(tmp_path, "train"))
    with ShardWriter(tmp_path / "rows", CORPUS_SCHEMA, rows_per_shard=700) as writer:
        for index in range(2_000):
            record = Record(f"{index:06d}", "s", "prompt_completion", f"p{index}", f"t{index}")
            writer.write(*record.values(), "validation" if index % 3 == 0 else "train")
    found = list(documents(tmp_path, "validation"))
    assert found == [(f"{index:06d}", f"p{index}", f"t{index}") for index in range(0, 2_000, 3)]
    assert [(row.id, row.prompt, row.text) for row in records(tmp_path, "validation")] == found


def packed_shard(path: Path, ids: list[list[int]], starts: list[list[int]]) -> None:
    kind = pyarrow.list_(pyarrow.int32())
    path.parent.parent.mkdir(exist_ok=True)
    columns = {"input_ids": ids, "labels": [[-100, *row[1:]] for row in ids], "document_starts": starts}
    table = pyarrow.table({name: pyarrow.array(value, kind) for name, value in columns.items()})
    write_shard(path, table.append_column("source", pyarrow.array([path.parent.name] * len(ids))))


def test_packed_rows_are_read_as_arrays_with_positions_that_restart_at_each_document(tmp_path: Path) -> None:
    packed_shard(tmp_path / "train" / "part-00000.parquet", [[1, 2, 3, 4], [5, 6, 7, 8]], [[0, 2], [0]])
    packed_shard(tmp_path / "train" / "part-00001.parquet", [[9, 9, 9, 9]], [[0, 1, 3]])
    split = PackedSplit.read(tmp_path, "train")
    assert split.sources == ["train"] * 3
    assert len(split) == 3 and split.input_ids.dtype == split.labels.dtype == np.int32
    assert split.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]]
    assert split.labels.tolist() == [[-100, 2, 3, 4], [-100, 6, 7, 8], [-100, 9, 9, 9]]
    assert [starts.tolist() for starts in split.document_starts] == [[0, 2], [0], [0, 1, 3]]
    ids, labels, places = split.trimmed(np.arange(2))
    assert ids.tolist() == split.input_ids[:2].tolist() and labels.tolist() == split.labels[:2].tolist()
    assert places.tolist() == [[0, 1, 0, 1], [0, 1, 2, 3]]
    assert positions(np.array([0, 3], np.int32), 5).tolist() == [0, 1, 2, 0, 1]


def test_rows_are_cut_where_the_longest_of_them_ends_and_padding_is_no_document() -> None:
    ids = np.array([[5, 6, 7, 8, 0, 0, 0, 0], [5, 6, 0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8]], np.int32)
    labels = np.where((ids == 0) | (np.arange(8) == 0), -100, ids).astype(np.int32)
    starts = [np.array(of_row, np.int32) for of_row in ([0, 2, 4], [0, 2], [0])]
    split = PackedSplit(ids, labels, starts, ["a"] * 3)
    assert split.lengths.tolist() == [4, 2, 8]
    cut, taught, places = split.trimmed(np.array([1, 0]))
    assert cut.tolist() == [[5, 6, 0, 0], [5, 6, 7, 8]]
    assert taught.tolist() == [[-100, 6, -100, -100], [-100, 6, 7, 8]]
    assert places.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]
    assert split.trimmed(np.arange(3))[0].shape == (3, 8)


def test_rows_of_unequal_length_are_no_packed_split(tmp_path: Path) -> None:
    packed_shard(tmp_path / "train" / "part-00000.parquet", [[1, 2, 3], [4, 5]], [[0], [0]])
    with pytest.raises(ArtifactError, match="not all 3 tokens long"):
        PackedSplit.read(tmp_path, "train")
