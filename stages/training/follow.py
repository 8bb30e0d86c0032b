"""The lines that training writes and its driver reads: one JSON object a line in `metrics.jsonl`. Apart, and free of
torch, because the file is the only channel between them: it outlives a killed worker, a killed driver and a slow tracker.

A line with `step` holds that step's metrics; a line with `event` is a sentence for people, one with `plan` says what is to
come, one with `summary` (numbers) and `histogram` (text) what the process that wrote it measured from its start to its end.
"""

import json
import os
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


class Writer:
    """Appends whole lines. A half line that a killed writer left is closed first, so that it spoils no later one."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("ab", buffering=0)
        with path.open("rb") as existing:
            self.found = existing.seek(0, os.SEEK_END) > 0
            """Whether an earlier attempt has written here."""
            if self.found and existing.seek(-1, os.SEEK_END) >= 0 and existing.read(1) != b"\n":
                self.file.write(b"\n")

    def write(self, **values: Any) -> None:
        """One line in one system call."""
        self.file.write(json.dumps(values, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        self.file.close()


class Follower:
    """Reads what is new, each step once: a step that was done again after a restart is equal to the first and dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: set[int] = set()
        self.offset = 0
        self.inode = 0

    def poll(self) -> list[dict[str, Any]]:
        """The whole new lines since the last call; [] while there are none. Never blocks."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self.inode or status.st_size < self.offset:
                    self.inode, self.offset = status.st_ino, 0
                file.seek(self.offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [line for line in map(_parsed, whole.splitlines()) if line is not None and self._is_new(line)]

    def _is_new(self, line: dict[str, Any]) -> bool:
        step = line.get("step")
        if not isinstance(step, int):
            return True
        new = step not in self.seen
        self.seen.add(step)
        return new


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
