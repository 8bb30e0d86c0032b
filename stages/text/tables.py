"""Takes rows out of CSV and Parquet files. Apart from lines of JSON, because here a file has one header for all rows.

Values of CSV are text, whatever they look like: NA, null, 007 and 1e5 stay as they stand there.
"""

import csv
from collections.abc import Iterator
from typing import Any

import pyarrow
import pyarrow.parquet

from stages.contract import StageError
from stages.storage.bucket import BucketError
from stages.text.containers import Item, Reading, Repaired, too_long
from stages.text.csv_lines import CsvLines
from stages.text.faults import Fault, shown
from stages.text.files import Container, File
from stages.text.formats import by_names
from stages.text.lines import refuse_other, whole
from stages.text.opening import opened

DELIMITERS = {",": ",", ";": ";", "\t": "\\t", "|": "|"}
"""As they are written on a command line."""
BATCH_BYTES = 16 * 2**20


def csv_rows(file: File, reading: Reading) -> Iterator[Item]:
    """A row's line is the one that it begins in; quoted values may hold line ends."""
    delimiter = reading.delimiter or ("\t" if file.container is Container.tsv else ",")
    csv.field_size_limit(min(reading.max_row_bytes, 2**31 - 1))
    lines = CsvLines(file, reading.max_row_bytes, delimiter)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        start = lines.begin()
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if header is None:
                raise _broken_header(file, _mended(lines.line), delimiter, str(error), reading) from None
            if lines.too_long and lines.number == start:
                yield start, too_long(reading)
            else:
                yield from _faults(file, start, lines.number, str(error), reading)
            continue
        if lines.too_long and header is None:
            raise StageError(
                f"{file.name}:{start}: the header is longer than stages.ingest.max_row_bytes={reading.max_row_bytes}; "
                "raise this"
            )
        if lines.too_long:
            yield start, too_long(reading)
        elif not any(values):  # also what a sheet writes for a row without anything in it
            continue
        elif header is None:
            header = _header(file, values, delimiter, reading)
        elif len(values) != len(header):
            yield from _each(start, lines.number, "column_count", f"{len(values)} values, {len(header)} columns")
        elif _is_header(values, header):
            yield start, Fault("repeated_header")
        else:
            yield start, _decoded(header, values, reading)


def _is_header(values: list[str], header: list[str]) -> bool:
    """As files have it that were joined, often behind a byte-order mark. In one column without a mark it may be a text."""
    first = values[0].removeprefix("\ufeff")
    marked = first != values[0]
    first = first.strip('"') if marked else first
    return first.strip() == header[0] and (marked or len(header) > 1) and [v.strip() for v in values[1:]] == header[1:]


def _broken_header(file: File, line: str, delimiter: str, said: str, reading: Reading) -> StageError:
    """Why `csv` cannot read the first line: another sign between quoted names, another line end, or something else."""
    if "new-line" in said and "\r" in line.rstrip("\r\n"):
        return StageError(f"{file.name}:1: the lines end in \\r alone; write it again with \\n")
    for other, written in DELIMITERS.items():
        try:
            names = next(csv.reader([line], delimiter=other, strict=True))
        except (csv.Error, StopIteration):
            continue
        if other != delimiter and by_names(names, reading.fields):
            return _parted(file, line.strip(), names, written)
    return StageError(f"{file.name}:1: the header is broken CSV ({said}); mend it")


def _parted(file: File, found: str, names: list[str], written: str) -> StageError:
    return StageError(
        f"{file.name}:1: found 1 column `{found}`, expected {','.join(names)}; the values are parted by "
        f"another sign: stages.ingest.source.delimiter='{written}'"
    )


def _faults(file: File, start: int, end: int, said: str, reading: Reading) -> Iterator[Item]:
    """Of a row that begins in line `start` and is given up in line `end`."""
    over, ended = "field limit" in said, "unexpected end" in said
    if end > start and over:
        raise StageError(
            f"{file.name}:{start}: a value that begins in this line is longer than stages.ingest.max_row_bytes="
            f"{reading.max_row_bytes} and goes over {end - start + 1:,} lines; is its quote never closed? close it, or raise this"
        )
    if end > start and ended:
        raise StageError(
            f"{file.name}:{start}: a quote that is opened in this line is never closed, so the {end - start:,} "
            "lines behind it cannot be told apart; close it"
        )
    if over or ended:
        yield start, too_long(reading) if over else Fault("cut_off", detail="a quote is never closed")
    else:
        yield from _each(start, end, "broken_csv")


def _each(start: int, end: int, rule: str, detail: str = "") -> Iterator[Item]:
    """A fault for every line: where quotes do not match, each may be a row of its own."""
    if end > start:
        detail = f"{detail}, lines {start} to {end}".removeprefix(", ")
    for number in range(start, end + 1):
        yield number, Fault(rule, detail=detail)


def _mended(text: str) -> str:
    """With U+FFFD for bytes that are no UTF-8, which came in as lone surrogates; a CSV file cannot hold these otherwise."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _decoded(header: list[str], values: list[str], reading: Reading) -> dict[str, Any] | Fault:
    if not all(map(str.isascii, values)):
        for name, value in zip(header, values, strict=True):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                if not reading.replace:
                    return Fault("invalid_utf8", name, f"character {error.start + 1}")
                return Repaired(zip(header, map(_mended, values), strict=True))
    return dict(zip(header, values, strict=True))


def _header(file: File, names: list[str], delimiter: str, reading: Reading) -> list[str]:
    found, names = names, [_mended(name).strip() for name in names]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1 and name]
    if twice:
        raise StageError(f"{file.name}:1: the column {shown(twice)} stands twice in the header; rename one")
    if names[0].startswith("sep="):
        raise StageError(
            f"{file.name}:1: begins with Excel's {names[0][:5]!r}; remove this line and set delimiter to that sign"
        )
    if not by_names(names, reading.fields):
        for other, written in DELIMITERS.items():
            split = names[0].split(other) if len(names) == 1 else []
            if len(split) > 1 and other != delimiter and by_names(split, reading.fields):
                raise _parted(file, names[0], split, written)
    for number, name in enumerate(found, 1):
        if not reading.replace and _mended(name) != name:
            raise StageError(
                f"{file.name}:1: the name of column {number} is not UTF-8; save the file as such (Excel: CSV UTF-8), or "
                "stages.ingest.source.encoding_errors=replace puts U+FFFD in its place"
            )
    return names


def parquet_rows(file: File, reading: Reading, wanted: frozenset[str], start: int, end: int | None) -> Iterator[Item]:
    """The rows of row groups `start` .. `end` - 1, numbered from 1. Only the columns that a format may ask for are read."""
    with whole(file), opened(file) as source:
        parquet = parquet_file(file, source)
        names = [name for name in parquet.schema_arrow.names if name in wanted]
        facts = parquet.metadata
        groups = list(range(start, facts.num_row_groups if end is None else end))
        taken = sum(facts.row_group(group).num_rows for group in groups)
        size = sum(facts.row_group(group).total_byte_size for group in groups) // max(taken, 1)
        number = 0
        try:
            batches = parquet.iter_batches(min(1_000, max(1, BATCH_BYTES // max(size, 1))), groups, names)
            for batch in batches:
                for row in _rows(batch, reading):
                    number += 1
                    yield number, row
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise _not_whole(file, error) from None


def parquet_file(file: File, source: Any) -> pyarrow.parquet.ParquetFile:
    try:
        parquet = pyarrow.parquet.ParquetFile(source, pre_buffer=False)
    except BucketError:
        raise
    except Exception as error:  # whatever broken bytes make the library raise
        if file.compression:
            raise StageError(f"{file.name}: Parquet is compressed inside already; unpack it") from None
        with opened(file) as again:
            head = again.read(32)
        if not head.startswith(b"PAR1"):
            refuse_other(file, head)
        raise _not_whole(file, error) from None
    names = parquet.schema_arrow.names
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise StageError(f"{file.name}: the column {shown(twice)} stands twice; rename one")
    return parquet


def columns(file: File) -> dict[str, Any]:
    """A row of a file's columns with empty values of their kinds."""
    with whole(file), opened(file) as source:
        schema = parquet_file(file, source).schema_arrow
    return {field.name: "" if _holds_text(field.type) else None for field in schema}


def _holds_text(kind: pyarrow.DataType) -> bool:
    return _binary(kind) != kind or pyarrow.types.is_dictionary(kind) or pyarrow.types.is_string_view(kind)


def row_groups(file: File) -> list[int]:
    """Rows in each row group."""
    with whole(file), opened(file) as source:
        facts = parquet_file(file, source).metadata
        return [facts.row_group(group).num_rows for group in range(facts.num_row_groups)]


def _not_whole(file: File, error: Exception) -> StageError:
    reason = str(error).partition("\n")[0][:120]
    return StageError(f"{file.name}: not a whole Parquet file ({reason}); write it again")


def _rows(batch: pyarrow.RecordBatch, reading: Reading) -> Iterator[dict[str, Any] | Fault]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # one that is not UTF-8 costs its row and not the file
        names = batch.schema.names
        columns = [column.cast(_binary(column.type)) for column in batch.columns]
        for index in range(batch.num_rows):
            raw = {name: column[index].as_py() for name, column in zip(names, columns, strict=True)}
            try:
                yield {name: _text(value, name, "strict") for name, value in raw.items()}
            except Fault as fault:
                if reading.replace:
                    yield Repaired({name: _text(value, name, "replace") for name, value in raw.items()})
                else:
                    yield fault


def _binary(kind: pyarrow.DataType) -> pyarrow.DataType:
    """The same type with bytes where it has strings."""
    if pyarrow.types.is_dictionary(kind):
        return _binary(kind.value_type)
    if pyarrow.types.is_string(kind):
        return pyarrow.binary()
    if pyarrow.types.is_large_string(kind):
        return pyarrow.large_binary()
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([field.with_type(_binary(field.type)) for field in kind])
    if pyarrow.types.is_large_list(kind):
        return pyarrow.large_list(kind.value_field.with_type(_binary(kind.value_type)))
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_binary(kind.value_type)))
    return kind


def _text(value: Any, field: str, errors: str) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise Fault("invalid_utf8", field, f"byte {error.start + 1}") from None
    if isinstance(value, list):
        return [_text(inner, field, errors) for inner in value]
    if isinstance(value, dict):
        return {name: _text(inner, field, errors) for name, inner in value.items()}
    return value
