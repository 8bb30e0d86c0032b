"""What clean does to rows, on the workers. Apart, because Ray ships these functions to them."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow

from stages.artifacts import ArtifactError
from stages.text.corpus import TRAIN, VALIDATION
from stages.text.normalise import content_key, in_validation, normalise_row
from stages.text.record import FIELDS, Record, prose
from stages.text.shards import CORPUS_SCHEMA, DROPPED_SCHEMA, ShardWriter, Table

KEYS_SCHEMA = pyarrow.schema([("high", pyarrow.uint64()), ("low", pyarrow.uint64()), ("position", pyarrow.int64())])
"""Half of a row's sha256 (128 bits are enough to tell 10^15 rows apart) and where it stands: all that deduplication moves."""
FACTS_SCHEMA = pyarrow.schema([("facts", pyarrow.string())])


@dataclass(frozen=True)
class Rules:
    """The limits that clean applies to each row alone, and the split."""

    min_characters: int
    max_characters: int
    validation_fraction: float

    def reason(self, record: Record) -> str | None:
        said = prose(record)
        if len(said) - len(record.prompt) < self.min_characters:
            return "too_short"
        return "too_long" if len(said) > self.max_characters else None


def rows(table: Table, order: dict[str, Any]) -> Iterator[tuple[int, Record]]:
    """(position, record) of the rows that an order names."""
    position = order["first"]
    for part in table.slices(order["first"], order["last"]):
        for values in zip(*(part.column(name).to_pylist() for name in FIELDS), strict=True):
            yield position, Record(*values)
            position += 1


def normalised(record: Record) -> Record:
    prompt, text = normalise_row(record.prompt, record.text)
    return replace(record, prompt=prompt, text=text)


def key_of(record: Record) -> bytes:
    """Content key: of prompt and text, or of what a chat or a preference consists of."""
    if record.messages or record.chosen:
        return content_key(record.messages + "\0" + record.tools, record.chosen + "\0" + record.rejected)
    return content_key(record.prompt, record.text)


def keys(order: dict[str, Any], table: Table, rules: Rules) -> Iterator[pyarrow.Table]:
    """First pass over a range of rows: content keys of those that pass the rules."""
    found: list[tuple[bytes, int]] = []
    for position, raw in rows(table, order):
        record = normalised(raw)
        if rules.reason(record) is None:
            found.append((key_of(record), position))
    halves = np.frombuffer(b"".join(key[:16] for key, _ in found), dtype=">u8").reshape(-1, 2).astype(np.uint64)
    columns = [halves[:, 0], halves[:, 1], np.array([position for _, position in found], np.int64)]
    yield pyarrow.table([pyarrow.array(column) for column in columns], schema=KEYS_SCHEMA)


def first_of_each(part: int, parts: int, *tables: pyarrow.Table) -> npt.NDArray[np.int64]:
    """Of all keys with `high % parts == part`: the positions of the first row of each, so equal rows meet in one task."""
    table = pyarrow.concat_tables([table for table in tables if table.num_rows] or [KEYS_SCHEMA.empty_table()])
    high, low, position = (table.column(name).to_numpy() for name in KEYS_SCHEMA.names)
    mine = high % np.uint64(parts) == part
    high, low, position = high[mine], low[mine], position[mine]
    order = np.lexsort((position, low, high))
    high, low, position = high[order], low[order], position[order]
    new = np.ones(len(order), bool)
    new[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    first: npt.NDArray[np.int64] = position[new]
    return first


def write(order: dict[str, Any], table: Table, rules: Rules, output: Path) -> Iterator[pyarrow.Table]:
    """Second pass over the rows of one output shard: write what stays and why the rest leaves; report the counts."""
    kept = np.unpackbits(np.frombuffer(order["kept"], np.uint8)).astype(bool)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    last = ""
    shard = order["shard"]
    with (
        ShardWriter(output / "rows", CORPUS_SCHEMA, first=shard) as stay,
        ShardWriter(output / "dropped", DROPPED_SCHEMA, first=shard, rows_per_shard=None) as leave,
    ):
        for position, raw in rows(table, order):
            if raw.id <= last:
                raise ArtifactError(
                    f"row {raw.id} stands after {last}: rows must stand in the order of their ids, each once"
                )
            order.setdefault("first_id", raw.id)
            last = raw.id
            record = normalised(raw)
            reason = rules.reason(record)
            if reason is None and not kept[position - order["first"]]:
                reason = "duplicate"
            if reason is None:
                split = VALIDATION if in_validation(key_of(record), rules.validation_fraction) else TRAIN
                stay.write(*record.values(), split)
            else:
                leave.write(raw.id, reason)
            _count(counts["in"], raw)
            _count(counts["normalised"], record)
            _count(counts[reason or split], record)
    facts = {"shard": shard, "first_id": order.get("first_id", ""), "last_id": last, "counts": counts}
    yield pyarrow.table([[json.dumps(facts)]], schema=FACTS_SCHEMA)


def _count(counts: Counter[str], record: Record) -> None:
    said = prose(record)
    counts["rows"] += 1
    counts["characters"] += len(said)
    counts["bytes"] += len(said.encode())
