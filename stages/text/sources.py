"""The sources of an ingest: which files each consists of, how they are read, and which format they are in. Apart from the stage,
because workers read by it.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from stages.contract import StageError
from stages.text.advice import advised, outlined
from stages.text.choices import Documentation
from stages.text.containers import Item, Reading, json_lines, text_units
from stages.text.faults import RULES, Fault
from stages.text.files import Container, File
from stages.text.formats import Decision, Format, recognise, repeats_prompt
from stages.text.json_files import json_values
from stages.text.lines import numbered
from stages.text.tables import columns, csv_rows, parquet_rows

SAMPLE = 20
"""Rows that decide a source's format."""
SEARCH = 1_000
"""Rows among which they are looked for."""


@dataclass(frozen=True)
class Source:
    """One configured source. `prefix` stands before the ids of its rows."""

    name: str
    prefix: str
    files: tuple[File, ...]
    """Empty: the standard library's documentation."""
    reading: Reading
    format: Format
    id_field: str | None
    documentation: Documentation = Documentation.text
    why: str = ""
    left_out: tuple[str, ...] = ()
    """Endings or names of files beside them."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def wanted(self) -> frozenset[str]:
        """The columns that are read of a Parquet file."""
        return self.reading.fields.all() | ({self.id_field} if self.id_field else frozenset())

    def rows(self, file: File, start: int = 0, end: int | None = None) -> Iterator[Item]:
        """(line, row or Fault) of a file, or of a range of it: bytes of JSON Lines, row groups of Parquet."""
        if file.container is Container.jsonl:
            lines = numbered(file, self.reading.max_row_bytes, start, end)
            yield from json_lines(lines, self.reading, head=start == 0)
        elif file.container is Container.json:
            yield from json_values(file, self.reading)
        elif file.container is Container.text:
            yield from text_units(file, self.reading)
        elif file.container is Container.parquet:
            yield from parquet_rows(file, self.reading, self.wanted(), start, end)
        else:
            yield from csv_rows(file, self.reading)

    def decided(self) -> "Source":
        """The same with the format that its first usable rows are in."""
        given = f"stages.ingest.source.format={self.format.value}"
        if self.format not in (Format.auto, Format.preference):
            return replace(self, why=given)
        if all(file.container is Container.text for file in self.files):
            return replace(self, format=Format.text, why=f"one row a {self.reading.unit.value}")
        votes: Counter[tuple[Format, str]] = Counter()
        repeated: list[bool] = []
        unknown: tuple[File, int, dict[str, Any]] | None = None
        looked_at, faults = 0, Counter[str]()
        for file, (line, row) in self._first():
            looked_at += 1
            if isinstance(row, Fault):
                faults[row.rule] += 1
                continue
            if (found := recognise(row, self.reading.fields)) is not None:
                votes[found] += 1
                repeated += [repeats_prompt(row, self.reading.fields)] if found[0] is Format.preference else []
                if votes.total() == SAMPLE:
                    break
            elif unknown is None:
                unknown = file, line, row
        # In one row it may be chance (a prompt "I" before two answers that begin with "I"), in all of them it is a habit.
        habitual = self.reading.fields.prompt_repeated
        if habitual is None:
            habitual = bool(repeated) and all(repeated)
        fields = replace(self.reading.fields, prompt_repeated=habitual)
        reading = replace(self.reading, fields=fields)
        habit = "; both answers repeat the prompt, which is taken off" if habitual else ""
        if self.format is not Format.auto:
            return replace(self, reading=reading, why=given + habit)
        if votes:
            decision = Decision.of(votes, looked_at)
            return replace(self, reading=reading, format=decision.format, why=decision.why + habit)
        if unknown is not None:
            raise StageError(self._unknown(*unknown))
        if looked_at == SEARCH:
            rules = ", ".join(f"{count:,} {rule}: {RULES[rule]}" for rule, count in faults.most_common())
            raise StageError(f"{self.files[0].name}: none of the first {SEARCH:,} rows can be used ({rules})")
        return self  # no row is usable, and they say themselves why

    def refuse_disguised(self) -> None:
        """Windows hides the ends of names: rows.jsonl.txt looks like rows.jsonl, and would be one long text."""
        for file in self.files[:1]:
            if file.container is not Container.text:
                return
            line = next(iter(numbered(file, self.reading.max_row_bytes)), (1, b""))[1] or b""
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            inner = PurePosixPath(file.name.removesuffix(".gz").removesuffix(".zst")).stem.lower()
            what = "csv" if inner.endswith(".csv") else "tsv" if inner.endswith(".tsv") else ""
            what = "jsonl" if isinstance(row, dict) and recognise(row, self.reading.fields) is not None else what
            if what:
                raise StageError(
                    f"{file.name}: is named as a text, but holds rows of {what}; container={what} reads them "
                    "(stages.ingest.source.container), container=text takes the file as it is"
                )

    def _first(self) -> Iterator[tuple[File, Item]]:
        left = SEARCH
        for file in self.files:
            for item in self.rows(file):
                yield file, item
                left -= 1
                if not left:
                    return

    def _unknown(self, file: File, line: int, row: dict[str, Any]) -> str:
        fields, where = self.reading.fields, "stages.ingest.source"
        if self.prefix:
            where = f"stages.ingest.mix.{self.name}"
        if file.container is Container.parquet:  # no column is read that no format may ask for
            row = columns(file) | row
        header = " (names from line 1)" if file.container in (Container.csv, Container.tsv) else ""
        advice = advised(row, where) or (
            f"name yours with {where}.text_field=, or .prompt_field= and .completion_field=, or .messages_field="
        )
        return (
            f"{file.name}:{line}: found the fields {outlined(row)}{header}; wanted {fields.text!r}, or {fields.prompt!r} and "
            f"{fields.completion!r}, or 'messages' (a list of role and content, or of from and value), or 'instruction' "
            f"and 'output', or {fields.chosen!r} and {fields.rejected!r}; {advice}"
        )
