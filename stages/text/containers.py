"""Takes rows out of JSON Lines and text files, each with its line. Apart from formats: the same chat can stand in any.

Every reader yields (line, row or Fault): what cannot be read costs its row, not the file. Strings stay as they are, and no
type is ever guessed.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stages.text.advice import listed_messages, looks_like_json, looks_otherwise
from stages.text.faults import Fault, kind
from stages.text.files import File, TextUnit
from stages.text.formats import Fields
from stages.text.json_text import Decoder
from stages.text.lines import Line, numbered

Row = dict[str, Any]


class Repaired(dict[str, Any]):
    """A row in which bytes that are not UTF-8 became U+FFFD."""


Item = tuple[int, Row | Fault]


@dataclass(frozen=True)
class Reading:
    """How the files of a source are read."""

    fields: Fields
    unit: TextUnit
    delimiter: str | None
    replace: bool
    """Bytes that are not UTF-8 become U+FFFD."""
    max_row_bytes: int


def json_lines(lines: Iterator[tuple[int, Line]], reading: Reading, *, head: bool = True) -> Iterator[Item]:
    """`head`: they are a file's first ones."""
    loads = Decoder().whole
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
