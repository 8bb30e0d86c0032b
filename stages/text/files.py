"""Reads a person's own files as rows. Apart, because every way in which such files are broken is dealt with here.

A row that cannot be used becomes a `Bad` with its line and a reason, never its text, which may be private; a file that
cannot be read at all is a StageError. Strings stay as they are, byte for byte, and no type is ever guessed.
"""

import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Any

from stages.contract import StageError

JSON_LINES = (".jsonl", ".json-lines", ".ndjson")
TEXT = (".txt", ".md")
PARQUET = (".parquet",)
KNOWN = (*JSON_LINES, *PARQUET, *TEXT, *(f"{suffix}.gz" for suffix in JSON_LINES + TEXT))


class TextUnit(Enum):
    """What makes one row of a text file."""

    file = "file"
    paragraph = "paragraph"
    line = "line"


@dataclass(frozen=True)
class Row:
    """`id` is `<name of the file>:<line, 9 digits>`, so that rows sort as they stand in the files."""

    id: str
    prompt: str
    text: str


@dataclass(frozen=True)
class Bad:
    """A row that cannot be used. `line` counts from 1 (rows of a Parquet file count as lines); `reason` is one of few, to
    be counted; `detail` says where in the line."""

    source: str
    line: int
    reason: str
    detail: str = ""


def row_id(name: str, line: int) -> str:
    return f"{name}:{line:09d}"


def find(path: str) -> list[tuple[str, Path]]:
    """(name, file) of what `path` names: a file, a directory with all below it, or a glob; in the order of the row ids.

    Names are relative to the directory or to the fixed part of the glob, so that ids do not depend on where files lie.
    """
    where = Path(path)
    if where.is_dir():
        root, candidates = where, [file for file in where.rglob("*") if not _hidden(file.relative_to(where))]
    elif where.exists() or not glob.has_magic(path):
        root, candidates = where.parent, [where]
    else:
        parts = where.parts
        magic = next(i for i, part in enumerate(parts) if glob.has_magic(part))
        root = Path(*parts[:magic])
        candidates = list(root.glob(str(Path(*parts[magic:]))))
    files = [file for file in candidates if not file.is_dir()]
    if files == [where]:
        _refuse_unreadable(where)
    found = [(file.relative_to(root).as_posix(), file) for file in files if file.name.lower().endswith(KNOWN)]
    if not found:
        seen = f"{len(files):,} files of other kinds" if where.is_dir() or len(files) != 1 else "a file of another kind"
        raise StageError(
            f"stages.ingest.source.path={path}: found {seen}, want {', '.join(KNOWN)}; convert or rename it"
        )
    for _, file in found:
        _refuse_unreadable(file)
    return sorted(found, key=lambda item: f"{item[0]}:")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _refuse_unreadable(file: Path) -> None:
    if not file.exists():
        raise StageError(f"stages.ingest.source.path: no file or directory {file} (seen from {Path.cwd()})")
    if not os.access(file, os.R_OK):
        raise StageError(f"stages.ingest.source.path: {file} cannot be read by this user; change its permissions")


class Reader:
    """Iterates over the rows of files in id order. After the first usable row `kind` says what the rows are."""

    def __init__(self, files: list[tuple[str, Path]], text: str, prompt: str, completion: str, unit: TextUnit) -> None:
        self.files, self.unit = files, unit
        self.fields = {"text": (text,), "prompt_completion": (prompt, completion)}
        self.kind = ""
        self.bytes_total = sum(file.stat().st_size for _, file in files)
        self.bytes_done = 0

    def __iter__(self) -> Iterator[Row | Bad]:
        for name, file in self.files:
            before = self.bytes_done
            yield from self._parquet(name, file) if file.suffix.lower() in PARQUET else self._lines(name, file)
            self.bytes_done = before + file.stat().st_size

    @property
    def fraction(self) -> float:
        """Share of the files' bytes read so far."""
        return min(self.bytes_done / max(self.bytes_total, 1), 1.0)

    @property
    def described(self) -> str:
        """What was read, and which fields were taken for what."""
        what = self.files[0][0] if len(self.files) == 1 else f"{len(self.files):,} files"
        plain = all(name.lower().removesuffix(".gz").endswith(TEXT) for name, _ in self.files)
        unit = f"one row a {self.unit.value}" if plain else f"fields {', '.join(self.fields.get(self.kind, ()))}"
        return f"{what} ({unit})"

    def _lines(self, name: str, file: Path) -> Iterator[Row | Bad]:
        try:
            with file.open("rb") as raw:
                stream: Iterable[bytes] = gzip.GzipFile(fileobj=raw) if file.suffix.lower() == ".gz" else raw
                lines = self._without_mark(name, raw, stream)
                plain = name.lower().removesuffix(".gz").endswith(TEXT)
                yield from self._text(name, lines) if plain else self._json(name, lines)
        except EOFError:
            raise StageError(f"{name}: truncated, the gzip stream ends too early; copy or compress it again") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise StageError(f"{name}: not a whole gzip file ({error}); copy or compress it again") from None
        except OSError as error:
            raise StageError(f"{name}: cannot be read ({error.strerror})") from None

    def _without_mark(self, name: str, raw: IO[bytes], stream: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
        """Numbered lines; a UTF-8 byte-order mark is dropped, UTF-16 is refused."""
        before = self.bytes_done
        for number, line in enumerate(stream, 1):
            if number == 1:
                if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line[:4]:
                    raise StageError(f"{name}: is UTF-16 or UTF-32, wanted UTF-8; save it as UTF-8")
                line = line.removeprefix(b"\xef\xbb\xbf")
            if number % 1000 == 0:
                self.bytes_done = before + raw.tell()
            yield number, line

    def _json(self, name: str, lines: Iterator[tuple[int, bytes]]) -> Iterator[Row | Bad]:
        for number, line in lines:
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                yield Bad(name, number, "invalid UTF-8", f"byte {error.start + 1}")
            except json.JSONDecodeError as error:
                yield Bad(name, number, "broken JSON", f"column {error.colno}")
            except (ValueError, RecursionError):  # a number of thousands of digits, brackets thousands deep
                yield Bad(name, number, "broken JSON")
            else:
                yield self._row(name, number, value)

    def _row(self, name: str, number: int, value: Any) -> Row | Bad:
        if not isinstance(value, dict):
            return Bad(name, number, "not a JSON object")
        self._decide(name, number, value)
        strings = []
        for field in self.fields[self.kind]:
            if field not in value:
                return Bad(name, number, f"no field {field!r}")
            string = value[field]
            if isinstance(string, bytes):
                try:
                    string = string.decode("utf-8")
                except UnicodeDecodeError as error:
                    return Bad(name, number, "invalid UTF-8", f"field {field!r}, byte {error.start + 1}")
            if not isinstance(string, str):
                found = "null" if string is None else f"of type {type(string).__name__}"
                return Bad(name, number, f"field {field!r} is {found}, not a string")
            if not string.isascii() and any("\ud800" <= character <= "\udfff" for character in string):
                return Bad(name, number, "lone surrogate", f"field {field!r}")
            strings.append(string)
        return Row(row_id(name, number), strings[0] if len(strings) == 2 else "", strings[-1])

    def _decide(self, name: str, number: int, value: Mapping[str, Any]) -> None:
        """The first row says what all rows are; a row set that fits neither kind is the user's to explain."""
        if self.kind:
            return
        for kind, fields in self.fields.items():
            if all(field in value for field in fields):
                self.kind = kind
                return
        (text,), (prompt, completion) = self.fields.values()
        shown = ", ".join(sorted(value)[:8]) or "none"
        raise StageError(
            f"{name}:{number}: found the fields {shown}; wanted {text!r}, or {prompt!r} and {completion!r}; "
            "name yours with stages.ingest.source.text_field=, or .prompt_field= and .completion_field="
        )

    def _text(self, name: str, lines: Iterator[tuple[int, bytes]]) -> Iterator[Row | Bad]:
        self.kind = self.kind or "text"
        held: list[bytes] = []
        start = 1
        for number, line in lines:
            if self.unit is TextUnit.line:
                yield from self._unit(name, number, [line])
            elif self.unit is TextUnit.paragraph and not line.strip():
                yield from self._unit(name, start, held)
                held = []
            else:
                start = start if held else number
                held.append(line)
        yield from self._unit(name, start if self.unit is not TextUnit.file else 1, held)

    def _unit(self, name: str, number: int, lines: list[bytes]) -> Iterator[Row | Bad]:
        if not any(line.strip() for line in lines):
            return
        whole = b"".join(lines)
        try:
            text = whole.decode("utf-8")
        except UnicodeDecodeError as error:
            yield Bad(name, number + whole.count(b"\n", 0, error.start), "invalid UTF-8")
        else:
            text = text if self.unit is TextUnit.file else text.rstrip("\r\n")
            yield Row(row_id(name, number), "", text)

    def _parquet(self, name: str, file: Path) -> Iterator[Row | Bad]:
        import pyarrow
        import pyarrow.parquet

        try:
            parquet = pyarrow.parquet.ParquetFile(file)
            self._decide(name, 1, dict.fromkeys(parquet.schema_arrow.names))
            wanted = [field for field in self.fields[self.kind] if field in parquet.schema_arrow.names]
            number, before = 0, self.bytes_done
            for batch in parquet.iter_batches(batch_size=1000, columns=wanted):
                columns = {field: _raw(batch.column(field)) for field in wanted}
                for values in zip(*columns.values(), strict=True):
                    number += 1
                    yield self._row(name, number, dict(zip(columns, values, strict=True)))
                self.bytes_done = before + file.stat().st_size * number // max(parquet.metadata.num_rows, 1)
        except (pyarrow.ArrowInvalid, OSError) as error:
            reason = str(error).partition("\n")[0][:120]
            raise StageError(f"{name}: not a whole Parquet file ({reason}); write it again") from None


def _raw(column: Any) -> list[Any]:
    """Strings as bytes, so that one that is not UTF-8 costs its row and not the file."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pyarrow.types.is_string(column.type):
        column = column.cast(pyarrow.binary())
    elif pyarrow.types.is_large_string(column.type):
        column = column.cast(pyarrow.large_binary())
    return list(column.to_pylist())
