"""Rows to questions and answers to rows, a window at a time. Apart from those who answer, which are a checkpoint or an endpoint.

A window is a fixed range of rows: what is finished of it stands in the journal, and once all windows are answered they are
turned into an artifact in the order of their rows, with one window in memory.
"""

import json
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow

from stages.artifacts import ArtifactError
from stages.text.journal import Entry, Journal
from stages.text.questions import Form, Question, Unanswerable, number
from stages.text.record import FIELDS, Record, prose
from stages.text.shards import DROPPED_SCHEMA, ROWS_PER_SHARD, ROWS_SCHEMA, ShardWriter, Table, shard_name, write_shard

ROWS_PER_WINDOW = 256
SCORES_SCHEMA = pyarrow.schema(
    [pyarrow.field("id", pyarrow.string(), nullable=False), pyarrow.field("score", pyarrow.float64(), nullable=False)]
)
DONE_SCHEMA = pyarrow.schema([("rows", pyarrow.int64())])
"""How many rows a worker has finished: all that comes back from it, the answers stand in the journal."""
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True)
class Origins:
    """The rows that are asked about: those of a table, of one split when it has splits, and of those the first `limit`."""

    table: Table
    split: str | None
    limit: int | None

    @property
    def total(self) -> int:
        """Rows of the table that windows are cut from."""
        return self.table.total if self.limit is None else min(self.table.total, self.limit)

    def orders(self) -> list[dict[str, Any]]:
        edges = range(0, self.total, ROWS_PER_WINDOW)
        return [
            {"window": window, "first": first, "last": min(first + ROWS_PER_WINDOW, self.total)}
            for window, first in enumerate(edges)
        ]

    def rows(self, order: dict[str, Any]) -> Iterator[tuple[int, Record]]:
        """(position, row) of one window."""
        position = order["first"]
        names = FIELDS if self.split is None else (*FIELDS, "split")
        for part in self.table.slices(order["first"], order["last"]):
            for values in zip(*(part.column(name).to_pylist() for name in names), strict=True):
                if self.split is None or values[-1] == self.split:
                    yield position, Record(*values[: len(FIELDS)])
                position += 1


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How an answer becomes a number, and which rows stay."""

    pattern: str | None
    """None: the score is measured (log-probability), not read."""
    minimum: float | None
    maximum: float | None
    keep_from: float | None
    """Rows that score less leave."""

    def of(self, entry: Entry) -> float:
        if self.pattern is None:
            return float(entry["score"])
        return number(entry["text"], self.pattern, self.minimum, self.maximum)


@dataclass
class Tally:
    """What was counted while the answers were turned into rows."""

    asked: int = 0
    quarantined: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    sources: dict[str, Counter[str]] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    scores: "array[float]" = field(default_factory=lambda: array("d"))

    @property
    def rows(self) -> int:
        return sum(counts["rows"] for counts in self.sources.values())

    @property
    def characters(self) -> int:
        return sum(counts["characters"] for counts in self.sources.values())

    def keep(self, record: Record) -> None:
        counts = self.sources.setdefault(record.source, Counter())
        counts.update(rows=1, characters=len(prose(record)))

    def meter(self, entry: Entry) -> None:
        """An endpoint need not tell how many tokens there were, or says null: what was told is summed up, and answers of which
        nothing was told are counted, so that nobody takes the sum for all of them."""
        told = {name: entry[name] for name in ("prompt_tokens", "tokens") if isinstance(entry.get(name), int)}
        self.tokens.update(told)
        if "text" in entry and len(told) < 2:
            self.tokens["answers_without_token_counts"] += 1

    def described_scores(self) -> dict[str, Any]:
        """All scores in numbers, those of rows that left among them."""
        values = np.frombuffer(self.scores)
        quantiles = {f"{share:g}": float(np.quantile(values, share)) for share in QUANTILES}
        return {"rows": len(values), "mean": float(values.mean()), "quantiles": quantiles}


def assemble(
    origins: Origins,
    journal: Journal,
    output: Path,
    *,
    form: Form,
    chat: bool,
    keep_unfinished: bool,
    scoring: Scoring | None,
) -> Tally:
    """Write the artifact's rows, why others left, what could not be used, and scores; return what was counted."""
    tally, last = Tally(), ""
    with (
        Scores(output / "scores") as scores,
        ShardWriter(output / "rows", ROWS_SCHEMA) as rows,
        ShardWriter(output / "dropped", DROPPED_SCHEMA, rows_per_shard=None) as dropped,
        (output / "quarantine.jsonl").open("w", encoding="utf-8") as quarantine,
    ):
        for order in origins.orders():
            entries = journal.read(order["window"])
            for position, origin in origins.rows(order):
                if origin.id <= last:
                    raise ArtifactError(
                        f"row {origin.id} stands after {last}: rows must stand in the order of their ids"
                    )
                last, entry = origin.id, entries[position]
                tally.asked += 1
                tally.meter(entry)
                try:
                    _require_answer(entry)
                    if scoring is not None:
                        score = scoring.of(entry)
                        tally.scores.append(score)
                        scores.write(origin.id, score)
                        made, left = origin, _below(score, scoring)
                    else:
                        made, left = _new(origin, entry, form, chat, keep_unfinished)
                except Unanswerable as problem:
                    tally.quarantined[problem.reason] += 1
                    facts = {"id": origin.id, "reason": problem.reason, "detail": problem.detail}
                    quarantine.write(json.dumps(facts, sort_keys=True, ensure_ascii=False) + "\n")
                    continue
                if left:
                    tally.dropped[left] += 1
                    dropped.write(origin.id, left, *[""] * (len(DROPPED_SCHEMA) - 2))
                else:
                    rows.write(*made.values())
                    tally.keep(made)
    return tally


class Scores:
    """Writes (id, score) of all scored rows, also of those that left."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._shard = directory, 0
        self._ids: list[str] = []
        self._values: list[float] = []

    def write(self, row_id: str, score: float) -> None:
        self._ids.append(row_id)
        self._values.append(score)
        if len(self._ids) == ROWS_PER_SHARD:
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None and self._ids:
            self._flush()

    def _flush(self) -> None:
        table = pyarrow.table([self._ids, self._values], schema=SCORES_SCHEMA)
        write_shard(self._directory / shard_name(self._shard), table)
        self._ids, self._values, self._shard = [], [], self._shard + 1


def _require_answer(entry: Entry) -> None:
    if "bad" in entry:
        raise Unanswerable(entry["bad"], entry.get("detail", ""))
    try:
        entry.get("text", "").encode()
    except UnicodeEncodeError:
        raise Unanswerable("not_unicode") from None


def _below(score: float, scoring: Scoring) -> str | None:
    return "below_threshold" if scoring.keep_from is not None and score < scoring.keep_from else None


def _new(origin: Record, entry: Entry, form: Form, chat: bool, keep_unfinished: bool) -> tuple[Record, str | None]:
    """The new row, and why it leaves (None: it stays)."""
    if not entry["finished"] and not keep_unfinished:
        return origin, "unfinished"
    answer = entry["text"].strip() if chat else entry["text"]
    if not answer.strip():
        return origin, "empty_answer"
    question: Question = form.question(origin, chat=chat)
    return form.record(origin, question, answer), None
