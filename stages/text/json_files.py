"""Takes rows out of JSON files, which are one value or a few, read a little ahead of what is decoded and never whole in memory.
Apart from lines of JSON, where a broken row ends with its line: here what cannot be decoded has no end that one could go on from.
"""

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterator
from typing import IO, Any

from stages.contract import StageError
from stages.text.containers import Item, Reading, Repaired, Row, json_lines
from stages.text.faults import Fault, kind, shown
from stages.text.files import File
from stages.text.formats import recognise
from stages.text.json_text import Decoder
from stages.text.lines import numbered, refuse_other, stream, whole

JSON_BLOCK = 2**20
WORD = 16
"""A number or a word that ends where the buffer ends may go on."""
DATA = re.compile(r'\s*\{(?:\s*"[^"\\]*"\s*:\s*(?:"(?:[^"\\]|\\.)*"|[-+.\w]+)\s*,)*\s*"data"\s*:\s*(?=\[)')
"""The head of {"version": "1", "data": [ ... ]}."""


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
        decoder, size, fault = Decoder(), JSON_BLOCK, None
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
            decoder = Decoder()
            value, _ = decoder.at(written.encode("utf-8", "surrogateescape").decode("utf-8", "replace"), 0)
            if decoder.twice:
                return decoder.fault()
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
