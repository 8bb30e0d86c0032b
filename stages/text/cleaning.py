"""What clean does to rows, on the workers. Apart, because Ray ships these functions to them.

`judged` reads the rows once, in ranges: it writes each as it would leave to a scratch table, beside what was found out about
it, and hands on keys alone. `write` puts the output together from that table once the keys have met.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from stages.text.blocks import FACTS_SCHEMA
from stages.text.corpus import TRAIN, VALIDATION
from stages.text.decontaminate import REASON as CONTAMINATED
from stages.text.duplicates import LEAVES, LEAVES_LATER, STAYS, keys_schema
from stages.text.judging import Judge, Judged, Steps
from stages.text.minhash import MinHash
from stages.text.record import FIELDS, Record
from stages.text.shards import CORPUS_SCHEMA, DROPPED_SCHEMA, ShardWriter, Table
from stages.text.waterfall import Tally

NUMBERS = ("came", "repaired", "leaves", "size")
SCRATCH_SCHEMA = pyarrow.schema(
    [pyarrow.field(name, pyarrow.string()) for name in (*FIELDS, "reason", "detail", "language", "masked")]
    + [pyarrow.field(name, pyarrow.int64()) for name in NUMBERS]
)
FATES = {"": STAYS, CONTAMINATED: LEAVES_LATER}


def judged(order: dict[str, Any], table: Table, steps: Steps, scratch: Path) -> Iterator[pyarrow.Table]:
    """First pass over a range of rows: the scratch table of it, and the keys by which its rows are compared."""
    judge = Judge(steps)
    bands = steps.near_duplicates.bands if steps.near_duplicates else 0
    position = order["first"]
    with ShardWriter(scratch, SCRATCH_SCHEMA, order["part"], None, compression="lz4") as writer:
        for part in table.slices(order["first"], order["last"]):
            records = map(Record, *(part.column(name).to_pylist() for name in FIELDS))
            rows = [judge.judge(record) for record in records]
            writer.write_table(_scratch(rows))
            yield _keys(rows, position, steps, bands)
            position += len(rows)


def _scratch(rows: list[Judged]) -> pyarrow.Table:
    values: list[Sequence[Any]] = list(zip(*(row.record.values() for row in rows), strict=True))
    values += [[getattr(row, name) for row in rows] for name in ("reason", "detail", "language")]
    values += [[json.dumps(row.masked, sort_keys=True) if row.masked else "" for row in rows]]
    values += [[getattr(row, name) for row in rows] for name in NUMBERS]
    return pyarrow.table(values, schema=SCRATCH_SCHEMA)


def _keys(rows: list[Judged], first: int, steps: Steps, bands: int) -> pyarrow.Table:
    places = [place for place, row in enumerate(rows) if row.key]
    keyed = [rows[place] for place in places]
    halves = np.frombuffer(b"".join(row.key[:16] for row in keyed), ">u8").reshape(-1, 2).astype(np.uint64)
    raw = np.frombuffer(b"".join(row.raw[:8] for row in keyed), ">u8").astype(np.uint64)
    side = np.array([row.side for row in keyed], np.uint64)
    fate = np.array([FATES.get(row.reason, LEAVES) for row in keyed], np.uint8)
    columns = [np.array(places, np.int64) + first, halves[:, 0], halves[:, 1], raw, side, fate]
    if steps.near_duplicates is None:
        columns.append(np.zeros(len(keyed), bool))
    else:
        found = MinHash(bands, steps.near_duplicates.rows, steps.near_duplicates.ngram)
        keys, known = found.keys([row.compared or "" for row in keyed])
        columns += [known, *keys.T]
    return pyarrow.table([pyarrow.array(column) for column in columns], schema=keys_schema(bands))


def write(order: dict[str, Any], table: Table, output: Path, examples: int) -> Iterator[pyarrow.Table]:
    """Second pass, over the scratch rows of one output shard: write what stays and why the rest leaves; report the counts."""
    validation = np.unpackbits(np.frombuffer(order["validation"], np.uint8)).astype(bool)
    copies = {row["position"]: (row["reason"], row["twin"]) for row in _unpacked(order["copies"]).to_pylist()}
    tally, shard, position = Tally(examples), order["shard"], order["first"]
    with (
        ShardWriter(output / "rows", CORPUS_SCHEMA, first=shard) as stay,
        ShardWriter(output / "dropped", DROPPED_SCHEMA, first=shard, rows_per_shard=None) as leave,
    ):
        for part in table.slices(order["first"], order["last"]):
            columns = (part.column(name).to_pylist() for name in SCRATCH_SCHEMA.names)
            for *row, reason, detail, language, masked, came, repaired, leaves, size in zip(*columns, strict=True):
                row_id, source = row[0], row[1]
                tally.follow(row_id)
                if position in copies:  # every reason that is asked later gives way
                    reason, twin = copies[position]
                    detail = f"of {twin}"
                if reason:
                    leave.write(row_id, reason, detail)
                    task = detail.rpartition(" ")[0] if reason == CONTAMINATED else ""
                    tally.left(reason, source, position, came, repaired, task)
                else:
                    split = VALIDATION if validation[position - order["first"]] else TRAIN
                    stay.write(*row, split)
                    tally.stayed(split, source, language, masked, came, repaired, leaves, size)
                position += 1
    yield pyarrow.table([[json.dumps({"shard": shard, **tally.facts()})]], schema=FACTS_SCHEMA)


def packed(table: pyarrow.Table) -> bytes:
    """A small table inside an order."""
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()


def _unpacked(data: bytes) -> pyarrow.Table:
    return pyarrow.ipc.open_stream(data).read_all()
