"""What a sweep knows of itself: a directory with its question and one line for each point that ended. Apart, because this and not
MLflow is its state: an interrupted sweep goes on from here, and `make best` reads nothing else.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.axes import Direction
from pipelines.mistakes import ConfigError, did_you_mean
from stages.contract import ResourcesUnavailable


@dataclass(frozen=True)
class Entry:
    """How one point ended."""

    number: int
    """1 for the first."""
    varied: dict[str, str]
    """Override key -> value, of what varies."""
    state: str
    """done, pruned or failed."""
    value: float | None = None
    """The metric that points are compared by."""
    metrics: dict[str, float] = field(default_factory=dict)
    curve: list[tuple[int, float]] = field(default_factory=list)
    """(step, value) of the metric that is listened to for pruning."""
    error: str | None = None

    @property
    def shown(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.varied.items()) or "the only point"


class Book:
    """The directory of one sweep: `sweep.json`, `points.jsonl`, `lock`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = directory.name

    @classmethod
    def of(cls, state: Path, name: str) -> "Book":
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ConfigError(f"SWEEP={name}: a name has letters, digits, . _ and - only")
        return cls(state / "sweeps" / name)

    @classmethod
    def latest(cls, state: Path) -> "Book":
        """The sweep that was begun last. Raises ConfigError."""
        books = all_books(state)
        if not books:
            raise ConfigError("there is no sweep yet: make sweep stages.train.learning_rate=1e-3,3e-3")
        return max(books, key=lambda book: book.question["begun"])

    def existing(self) -> "Book":
        """This sweep. Raises ConfigError when it was never begun."""
        if not self.begun:
            names = [book.name for book in all_books(self.directory.parent.parent)]
            raise ConfigError(f"SWEEP={self.name}: no such sweep{did_you_mean(self.name, names)}")
        return self

    @property
    def begun(self) -> bool:
        return (self.directory / "sweep.json").exists()

    @property
    def question(self) -> dict[str, Any]:
        """overrides (as typed), begun (seconds), journal (the name under which MLflow knows the run), metric, direction."""
        loaded: dict[str, Any] = json.loads((self.directory / "sweep.json").read_text("utf-8"))
        return loaded

    def ask(self, question: dict[str, Any]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = self.directory / "sweep.json.partial"
        partial.write_text(json.dumps(question, indent=1), "utf-8")
        partial.replace(self.directory / "sweep.json")

    def write(self, entry: Entry) -> None:
        """The end of a point; a later line for the same number replaces an earlier one."""
        with (self.directory / "points.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(entry)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def entries(self) -> list[Entry]:
        """By number. A line that a kill cut short counts for nothing."""
        found: dict[int, Entry] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self.directory / "points.jsonl").read_text("utf-8").splitlines():
                with contextlib.suppress(ValueError):
                    facts = json.loads(line)
                    found[facts["number"]] = Entry(**{**facts, "curve": [(s, v) for s, v in facts["curve"]]})
        return [found[number] for number in sorted(found)]

    def best(self) -> Entry | None:
        """The finished point with the best value; of equals the first."""
        done = [entry for entry in self.entries() if entry.state == "done" and entry.value is not None]
        sign = 1 if self.question["direction"] == Direction.minimize.name else -1
        return min(done, key=lambda entry: sign * (entry.value or 0.0), default=None)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process makes points of a sweep. Raises ResourcesUnavailable."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ResourcesUnavailable(f"SWEEP={self.name}: another process is at this sweep") from None
            yield


def all_books(state: Path) -> list[Book]:
    return [Book(place.parent) for place in sorted((state / "sweeps").glob("*/sweep.json"))]
