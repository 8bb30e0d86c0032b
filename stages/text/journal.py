"""What a stage has finished row by row, kept so that a killed run goes on where it was. Apart from what the rows are.

Each process appends to files of its own, one for each window of rows, and never to a file that it found: a line that a kill
cut in half ends its file, carries no valid checksum and counts as never written.
"""

import json
import os
import secrets
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


@dataclass(frozen=True)
class Journal:
    """The files of one directory; any number of processes may add to it at once."""

    directory: Path
    _writer: str = field(default_factory=lambda: f"{os.getpid()}-{secrets.token_hex(8)}")

    def add(self, window: int, entries: Iterable[tuple[int, Entry]]) -> None:
        """Keep what became of some rows, by position."""
        lines = b"".join(_line(position, entry) for position, entry in entries)
        with (self.directory / f"{window:08d}.{self._writer}.jsonl").open("ab") as file:
            file.write(lines)

    def read(self, window: int) -> dict[int, Entry]:
        """What is kept of a window, by position. What was passing (`again`) yields to what came of asking again."""
        kept: dict[int, Entry] = {}
        for path in sorted(self.directory.glob(f"{window:08d}.*.jsonl")):
            for line in path.read_bytes().split(b"\n")[:-1]:
                found = _parsed(line)
                if found is not None and (found[0] not in kept or kept[found[0]].get("again")):
                    kept[found[0]] = found[1]
        return kept


def _line(position: int, entry: Entry) -> bytes:
    body = json.dumps([position, entry], ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _parsed(line: bytes) -> tuple[int, Entry] | None:
    checksum, _, body = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        return None
    position, entry = json.loads(body.decode("utf-8", "surrogatepass"))
    return position, entry
