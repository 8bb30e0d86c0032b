"""What ingest does to files, on the workers. Apart, because Ray ships these functions to them.

Work is cut into parts: a few small files, a range of bytes of a large JSON Lines file, some row groups of a Parquet file. Each
part's rows and faults are written apart; then the rows are cut again, in their order, into shards that show nothing of it.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute

from stages.text.blocks import FACTS_SCHEMA
from stages.text.chats import Texts
from stages.text.containers import Repaired, too_long
from stages.text.conversion import parts
from stages.text.faults import Fault
from stages.text.files import Container, File
from stages.text.formats import repeats_prompt
from stages.text.lines import line_starts
from stages.text.record import PREFERENCE, Record, prose
from stages.text.shards import CHARACTERS_PER_GROUP, ROWS_PER_GROUP, ROWS_SCHEMA, ShardWriter, Table
from stages.text.sources import Source
from stages.text.tables import row_groups

IDS = np.dtype([("id", np.uint64), ("content", np.uint64), ("part", np.int64), ("row", np.int64)])
LEAST_BYTES, MOST_BYTES = 64 * 2**10, 64 * 2**20
"""Of one part."""
LINES_SHOWN = 5
Order = dict[str, Any]
Found = tuple[Record, str | None, bool, bool]
"""A record, its row's own id, whether a text was repaired, whether both answers of a preference begin with the prompt."""


def orders(sources: list[Source], blocks: int) -> list[Order]:
    """The parts of all sources, in the order of their rows' ids. Lines before a range of bytes are not known yet."""
    size = min(max(sum(source.bytes for source in sources) // blocks, LEAST_BYTES), MOST_BYTES)
    made: list[Order] = []
    for number, source in enumerate(sources):
        held: list[int] = []
        whole = {"source": number, "start": 0, "end": -1, "line": 0}
        for index, file in enumerate(source.files):
            pieces = list(_pieces(file, size))
            if len(pieces) == 1 and (not held or sum(source.files[i].bytes for i in held) + file.bytes <= size):
                held.append(index)
                continue
            if held:
                made.append(whole | {"first": held[0], "last": held[-1] + 1})
            held = [index] if len(pieces) == 1 else []
            for start, end, line in pieces if len(pieces) > 1 else ():
                made.append(whole | {"first": index, "last": index + 1, "start": start, "end": end, "line": line})
        if held or not source.files:
            made.append(whole | {"first": held[0] if held else 0, "last": held[-1] + 1 if held else 0})
    return [order | {"part": part, "limit": -1} for part, order in enumerate(made)]


def _pieces(file: File, size: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, rows before it) of the ranges that a file is read in; rows are -1 where they must be counted first."""
    if file.bytes > size and file.container is Container.jsonl and not file.compression:
        for start in range(0, file.bytes, size):
            yield start, min(start + size, file.bytes), -1
    elif file.bytes > size and file.container is Container.parquet:
        counts = row_groups(file)
        each = max(1, len(counts) * size // file.bytes)
        for group in range(0, max(len(counts), 1), each):
            yield group, min(group + each, len(counts)), sum(counts[:group])
    else:
        yield 0, -1, 0


def count(order: Order, sources: list[Source]) -> Iterator[pyarrow.Table]:
    """How many lines begin in a range."""
    file = sources[order["source"]].files[order["first"]]
    yield _facts({"part": order["part"], "lines": line_starts(file, order["start"], order["end"])})


@dataclass
class Counts:
    """What was found in one part."""

    rows: int = 0
    characters: int = 0
    repaired: int = 0
    repeats: int = 0
    """Preferences in which both answers begin with the prompt."""
    kinds: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[str]] = field(default_factory=dict)

    def fault(self, where: str, fault: Fault) -> None:
        self.rules[fault.rule] += 1
        said = " ".join(word for word in (fault.field, fault.detail) if word)
        if len(shown := self.first.setdefault(fault.rule, [])) < LINES_SHOWN:
            shown.append(where + (f" ({said})" if said else ""))


def read(order: Order, sources: list[Source], output: Path) -> Iterator[pyarrow.Table]:
    """The rows of one part as records, and why the others cannot be used; report the counts."""
    source, part, limit = sources[order["source"]], order["part"], order["limit"]
    counts = Counts()
    clashes: list[tuple[int, int, int, int]] = []
    with (
        ShardWriter(output / "rows", ROWS_SCHEMA, first=part, rows_per_shard=None, compression="none") as writer,
        (output / f"faults-{part:06d}.jsonl").open("w", encoding="utf-8", errors="backslashreplace") as faults,
    ):
        for where, found in _found(order, source):
            if isinstance(found, Fault):
                counts.fault(f"{where[0]}:{where[1]}", found)
                faults.write(_line(where, found))
                continue
            record, own_id, repaired, repeats = found
            if own_id is not None:
                clashes.append(
                    (_hash(f"{source.name}\0{own_id}"), _hash("\0".join(record.values()[2:])), part, counts.rows)
                )
            writer.write(*record.values())
            counts.rows += 1
            counts.repaired += repaired
            counts.repeats += repeats
            counts.characters += len(prose(record))
            counts.kinds[record.kind] += 1
            if counts.rows == limit:
                break
    (output / f"ids-{part:06d}.npy").unlink(missing_ok=True)  # of this part, read up to another limit
    if clashes:
        np.save(output / f"ids-{part:06d}.npy", np.array(clashes, IDS))
    yield _facts({"part": part, "source": order["source"]} | vars(counts))


def _found(order: Order, source: Source) -> Iterator[tuple[tuple[str, int], Fault | Found]]:
    """((file, line), what was found or Fault) of all rows of a part."""
    if not source.files:
        yield from _documentation(source)
        return
    reading, id_field = source.reading, source.id_field
    for file in source.files[order["first"] : order["last"]]:
        end = None if order["end"] < 0 else order["end"]
        name = source.prefix + file.name
        for line, row in source.rows(file, order["start"], end):
            line += order["line"]
            if isinstance(row, Fault):
                yield (name, line), row
                continue
            texts = Texts(replace=reading.replace)
            try:
                fields = parts(row, source.format, reading.fields, texts)
            except Fault as fault:
                yield (name, line), fault
                continue
            own_id = row.get(id_field) if id_field else None
            record = Record(f"{name}:{line:09d}", source.name, **fields)
            if sum(map(len, record.values())) > reading.max_row_bytes:  # containers without lines do not tell
                yield (name, line), too_long(reading)
                continue
            repaired = texts.repaired or isinstance(row, Repaired)
            repeats = record.kind == PREFERENCE and repeats_prompt(row, reading.fields)
            yield (name, line), (record, None if own_id is None else str(own_id), repaired, repeats)


def _documentation(source: Source) -> Iterator[tuple[tuple[str, int], Found]]:
    from stages.text import docstrings, documentation

    for record in documentation.records(docstrings.rows(), source.name, source.prefix, source.documentation):
        yield (record.id.removeprefix(source.prefix), 1), (record, None, False, False)


def _line(where: tuple[str, int], fault: Fault) -> str:
    said = {"file": where[0], "line": where[1], "rule": fault.rule, "field": fault.field, "detail": fault.detail}
    return json.dumps(said, ensure_ascii=False, sort_keys=True) + "\n"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def clashing(directory: Path, numbers: list[int]) -> npt.NDArray[Any]:
    """The rows of some parts whose own id stands on another content in front of them too, in order."""
    paths = [directory / f"ids-{part:06d}.npy" for part in numbers]
    found = [np.load(path) for path in paths if path.exists()]
    if not found:
        return np.empty(0, IDS)
    ids = np.concatenate(found)
    ids = ids[np.lexsort((ids["row"], ids["part"], ids["id"]))]
    new = np.ones(len(ids), bool)
    new[1:] = ids["id"][1:] != ids["id"][:-1]
    first = ids["content"][np.maximum.accumulate(np.where(new, np.arange(len(ids)), 0))]
    others = ids[ids["content"] != first]
    return others[np.lexsort((others["row"], others["part"]))]


def write(order: Order, table: Table, output: Path) -> Iterator[pyarrow.Table]:
    """One shard of the artifact."""
    with ShardWriter(output / "rows", ROWS_SCHEMA, first=order["shard"], rows_per_shard=None) as writer:
        for group in groups(table.slices(order["first"], order["last"])):
            writer.write_table(group)
    yield _facts({"shard": order["shard"]})


def groups(tables: Iterator[pyarrow.Table]) -> Iterator[pyarrow.Table]:
    """The same rows in groups that end where ShardWriter ends them, however they came."""
    held: list[pyarrow.Table] = []
    rows = characters = 0
    for table in tables:
        lengths = sum(pyarrow.compute.utf8_length(column).to_numpy().astype(np.int64) for column in table.columns)
        start = 0
        while start < table.num_rows:
            reached = characters + np.cumsum(lengths[start : start + ROWS_PER_GROUP - rows])
            full = int(np.searchsorted(reached, CHARACTERS_PER_GROUP))
            taken = min(full + 1, len(reached))
            held.append(table.slice(start, taken))
            rows, characters, start = rows + taken, int(reached[taken - 1]), start + taken
            if rows == ROWS_PER_GROUP or characters >= CHARACTERS_PER_GROUP:
                yield pyarrow.concat_tables(held).combine_chunks()
                held, rows, characters = [], 0, 0
    if held:
        yield pyarrow.concat_tables(held).combine_chunks()


def _facts(facts: dict[str, Any]) -> pyarrow.Table:
    return pyarrow.table([[json.dumps(facts)]], schema=FACTS_SCHEMA)
