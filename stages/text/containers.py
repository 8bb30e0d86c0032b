"""Takes rows out of JSON Lines, JSON and text files, each with its line. Apart from formats: the same chat can stand in any.

Every reader yields (line, row or Fault): what cannot be read costs its row, not the file. Strings stay as they are, and no
type is ever guessed.
"""

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from stages.contract import StageError
from stages.text.advice import listed_messages, looks_like_json, looks_otherwise
from stages.text.faults import Fault, kind, shown
from stages.text.files import File, TextUnit
from stages.text.formats import Fields, recognise
from stages.text.lines import Line, numbered, refuse_other, stream, whole

Row = dict[str, Any]


class Repaired(dict[str, Any]):
    """A row in which bytes that are not UTF-8 became U+FFFD."""


Item = tuple[int, Row | Fault]
JSON_BLOCK = 2**20
WORD = 16
"""A number or a word that ends where the buffer ends may go on."""
DATA = re.compile(r'\s*\{(?:\s*"[^"\\]*"\s*:\s*(?:"(?:[^"\\]|\\.)*"|[-+.\w]+)\s*,)*\s*"data"\s*:\s*(?=\[)')
"""The head of {"version": "1", "data": [ ... ]}."""


@dataclass(frozen=True)
class Reading:
    """How the files of a source are read."""

    fields: Fields
    unit: TextUnit
    delimiter: str | None
    replace: bool
    """Bytes that are not UTF-8 become U+FFFD."""
    max_row_bytes: int


class _Decoder:
    """JSON, and the keys that stand twice in one object with two values: a plain decoder loses the first without a word."""

    def __init__(self) -> None:
        self.json = json.JSONDecoder(object_pairs_hook=self._object)
        self.twice: list[str] = []

    def _object(self, pairs: list[tuple[str, Any]]) -> Row:
        made = dict(pairs)
        if len(made) != len(pairs):
            self.twice += [name for name, value in pairs if made[name] != value]
        return made

    def line(self, text: str) -> Any:
        self.twice = []
        value = self.json.decode(text)
        if self.twice:
            raise self.fault()
        return value

    def at(self, text: str, start: int) -> tuple[Any, int]:
        """The value that begins there, and where it ends."""
        self.twice = []
        return self.json.raw_decode(text, start)

    def fault(self) -> Fault:
        return Fault("repeated_key", detail=shown(dict.fromkeys(self.twice)))


def json_lines(lines: Iterator[tuple[int, Line]], reading: Reading, *, head: bool = True) -> Iterator[Item]:
    """`head`: they are a file's first ones."""
    loads = _Decoder().line
    for number, line in lines:
        if line is None:
            yield number, too_long(reading)
        elif not line.isspace():
            try:
                value = loads(line.decode())
            except UnicodeDecodeError as error:
                if reading.replace:
                    again = json_lines(iter([(number, line.decode("utf-8", "replace").encode())]), reading)
                    yield from ((number, Repaired(row) if isinstance(row, dict) else row) for _, row in again)
                else:
                    yield number, Fault("invalid_utf8", detail=f"byte {error.start + 1}")
            except json.JSONDecodeError as error:
                last = not line.endswith(b"\n") and error.pos >= len(error.doc) - 1
                unended = not line.endswith(b"\n") and error.msg.startswith("Unterminated")
                rule = "cut_off" if last or unended else "broken_json"
                yield (
                    number,
                    Fault(
                        rule,
                        detail=f"column {error.colno}"
                        + (looks_like_json(head and number == 1, line) or looks_otherwise(line, error)),
                    ),
                )
            except (ValueError, RecursionError):  # a number of thousands of digits, brackets thousands deep
                yield number, Fault("broken_json")
            except Fault as fault:
                yield number, fault
            else:
                if type(value) is dict:
                    yield number, value
                else:
                    yield (
                        number,
                        Fault(
                            "not_an_object",
                            detail=kind(value)
                            + (listed_messages(value) or looks_like_json(head and number == 1, line)),
                        ),
                    )


def too_long(reading: Reading) -> Fault:
    return Fault("row_too_long", detail=f"more than {reading.max_row_bytes:,} bytes")


def json_values(file: File, reading: Reading) -> Iterator[Item]:
    """Arrays and objects one behind the other, {"data": [...]}, or JSON Lines under the wrong name; never whole in memory."""
    with whole(file), stream(file) as source:
        text = _Text(file, source, reading)
        head = text.head()
        if head[:1] == "{":
            first, after = text.first_line()
            if not (after and _complete(first)):
                wrapped = DATA.match(text.buffer)
                yield from text.wrapped(wrapped[0]) if wrapped else text.documents()
                return
        elif head[:1] == "[":
            yield from text.documents()
            return
        elif not head:
            return
        else:
            refuse_other(file, head[:32].encode("utf-8", "replace"))
            comment = "; JSON has no comments: take them out" if head[:1] in "/#" else ""
            raise StageError(
                f"{file.name}: begins with neither [ nor {{, so it is no JSON; want an array of objects{comment}"
            )
    yield from json_lines(numbered(file, reading.max_row_bytes), reading)


def _complete(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


class _Text:
    """A JSON file as text that is read a little ahead of what is decoded."""

    def __init__(self, file: File, source: IO[bytes], reading: Reading) -> None:
        self.file, self.source, self.reading = file, source, reading
        self.decoder = getincrementaldecoder("utf-8")("surrogateescape")
        self.buffer, self.at, self.ended, self.begun = "", 0, False, False
        self.dirty = False

    def more(self, size: int = JSON_BLOCK) -> None:
        block = self.source.read(size)
        if not self.begun:
            if block.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in block[:4]:
                raise StageError(f"{self.file.name}: is UTF-16 or UTF-32, wanted UTF-8; save it as UTF-8")
            block, self.begun = block.removeprefix(b"\xef\xbb\xbf"), True
        self.ended = not block
        text = self.decoder.decode(block, final=self.ended)
        self.dirty = self.dirty or _escaped(text)
        self.buffer = self.buffer[self.at :] + text
        self.at = 0

    def head(self) -> str:
        while not self.buffer.strip() and not self.ended:
            self.more()
        self.buffer = self.buffer.lstrip()
        return self.buffer

    def first_line(self) -> tuple[str, str]:
        """It, and something of what stands behind it, read as far as a row may be long."""
        while True:
            first, _, after = self.buffer.partition("\n")
            if after.strip() or self.ended or len(self.buffer) > self.reading.max_row_bytes:
                return first, after.strip()
            self.more(max(JSON_BLOCK, len(self.buffer)))

    def drop(self, characters: int) -> None:
        self.at += characters

    def peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            while self.at < len(self.buffer) and self.buffer[self.at] in " \t\r\n":
                self.at += 1
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if self.ended:
                return ""
            self.more()

    def value(self, number: int) -> Row | Fault:
        """Decode the next value, reading on (twice as much each time) until it is whole."""
        decoder, size, fault = _Decoder(), JSON_BLOCK, None
        while True:
            try:
                value, end = decoder.at(self.buffer, self.at)
                if end < len(self.buffer) or self.ended:
                    written = self.buffer[self.at : end] if self.dirty else ""
                    self.at = end
                    return fault or (decoder.fault() if decoder.twice else self._row(value, written))
            except (ValueError, RecursionError) as error:
                if isinstance(error, RecursionError):
                    raise StageError(f"{self.file.name}: item {number} is nested too deeply to be read") from None
                if not isinstance(error, json.JSONDecodeError):  # a number of thousands of digits
                    decoder.json, fault = json.JSONDecoder(parse_int=len), Fault("broken_json")
                    continue
                at = error.pos
                unterminated = "Unterminated" in str(error) or at >= len(self.buffer.rstrip()) - WORD
                if self.ended or not unterminated:
                    cut = self.ended and ("Unterminated" in str(error) or at >= len(self.buffer.rstrip()))
                    what = "is cut off" if cut else f"is broken JSON (character {at - self.at + 1} of it)"
                    raise StageError(
                        f"{self.file.name}: item {number} {what}; mend it, or write one object a line (.jsonl), where a bad "
                        "one costs only itself"
                    ) from None
                if len(self.buffer) - self.at > self.reading.max_row_bytes:
                    raise StageError(
                        f"{self.file.name}: item {number} is broken JSON, or longer than "
                        f"stages.ingest.max_row_bytes={self.reading.max_row_bytes}; write one object a line (.jsonl)"
                    ) from None
            self.more(size)
            size = len(self.buffer)

    def items(self, before: int = 0) -> Iterator[Item]:
        """The items of the array that begins here; an item's place, behind those `before` it, counts as its line."""
        self.drop(1)
        number = before
        while (found := self.peek()) != "]":
            if number > before:
                if found != ",":
                    what = "is cut off" if not found else "has no comma"
                    raise StageError(f"{self.file.name}: the array {what} after item {number}; write the file again")
                self.drop(1)
                if self.peek() == "]":
                    raise StageError(
                        f"{self.file.name}: item {number + 1} is missing: a comma stands before the end of the array; "
                        "write the file again"
                    )
            number += 1
            yield number, self.value(number)
        self.drop(1)

    def wrapped(self, head: str) -> Iterator[Item]:
        """The items of the array behind `head`; behind it only the rest of the object in which it stands may follow."""
        self.drop(len(head))
        number = 0
        for number, item in self.items():
            yield number, item
        self.buffer, self.at = f"{head}0{self.buffer[self.at :]}", 0
        rest = self.value(number + 1)
        if self.peek() or (isinstance(rest, Fault) and rest.rule == "repeated_key"):
            raise StageError(
                f'{self.file.name}: more stands behind the {number:,} rows of the first "data"; write the rows of all one '
                "a line: jq -c '.data[]' does so, with .jsonl as the name's end"
            )

    def _row(self, value: Any, written: str) -> Row | Fault:
        if _escaped(written):
            if not self.reading.replace:
                return Fault("invalid_utf8")
            value = json.loads(written.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
            value = Repaired(value) if isinstance(value, dict) else value
        return value if isinstance(value, dict) else Fault("not_an_object", detail=kind(value))

    def documents(self) -> Iterator[Item]:
        """Objects and arrays of them one behind the other, as jq and cat write them; a row's place counts as its line."""
        number = 0
        while sign := self.peek():
            if sign == "\ufeff":  # the byte-order mark of the next file
                self.drop(1)
            elif sign == "[":
                for place, item in self.items(number):
                    yield place, item
                    number = place
            else:
                number += 1
                found = self.value(number)
                yield number, self._only(found) if number == 1 and not self.peek() else found

    def _only(self, value: Row | Fault) -> Row | Fault:
        if isinstance(value, Fault):
            return value
        if recognise(value, self.reading.fields) is None or _by_column(value):
            how = "; pandas writes rows with to_json(path, orient='records', lines=True)" if _by_column(value) else ""
            inside = [
                name for name, rows in value.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)
            ]
            if inside:
                how = f"; are the rows in {shown(inside)}? jq -c '.{shown(inside[:1])}[]' writes them one a line"
            raise StageError(
                f"{self.file.name}: is one object with the keys {shown(value)}; want an array of rows, or "
                f'{{"data": [rows]}}{how}'
            )
        return value


def _by_column(value: Row) -> bool:
    """{"text": {"0": ..., "1": ...}, ...}"""
    return bool(value) and all(isinstance(column, dict) and "0" in column for column in value.values())


def _escaped(text: str) -> bool:
    """Whether bytes that are not UTF-8 came in as lone surrogates; written out they cannot be anything else."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def text_units(file: File, reading: Reading) -> Iterator[Item]:
    """Whole files, paragraphs (up to a blank line) or lines."""
    held: list[bytes] = []
    size, start, over = 0, 1, False

    def unit() -> Iterator[Item]:
        if over:
            yield start, too_long(reading)
        elif any(not line.isspace() for line in held):
            whole_unit = b"".join(held)
            row: Row = {}
            try:
                text = whole_unit.decode()
            except UnicodeDecodeError as error:
                if not reading.replace:
                    yield start + whole_unit.count(b"\n", 0, error.start), Fault("invalid_utf8")
                    return
                row, text = Repaired(), whole_unit.decode("utf-8", "replace")
            row[reading.fields.text] = text if reading.unit is TextUnit.file else text.rstrip("\r\n")
            yield start, row

    for number, line in numbered(file, reading.max_row_bytes):
        ends = reading.unit is TextUnit.line or (
            reading.unit is TextUnit.paragraph and line is not None and line.isspace()
        )
        if ends and reading.unit is TextUnit.paragraph:
            yield from unit()
            held, size, over = [], 0, False
            continue
        if not held and not over and reading.unit is not TextUnit.file:
            start = number
        size += len(line or b"")
        if line is None or size > reading.max_row_bytes:
            over, held = True, []
        else:
            held.append(line)
        if ends:
            yield from unit()
            held, size, over = [], 0, False
    yield from unit()
