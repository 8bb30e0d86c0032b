"""What came in, what left at each step and why, what went out: in numbers, for the whole and for each source. Apart from the
work, because every row must be accounted for in one place."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from stages.artifacts import ArtifactError

UNITS = ("rows", "characters", "bytes")
SPLITS = ("train", "validation")
Facts = dict[str, Any]


class Tally:
    """Counts the rows of one shard; the driver merges what all shards counted. Order of arrival does not matter."""

    def __init__(self, examples: int) -> None:
        self.first_id = self.last_id = ""
        self.examples = examples
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        """step -> units"""
        self.sources: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
        """source -> "in", "dropped", "languages", a split -> numbers"""
        self.lengths: Counter[str] = Counter()
        """Power of two -> rows that go out with so many characters: n counts those from 2^(n-1) to 2^n - 1."""
        self.masked: Counter[str] = Counter()
        self.tasks: Counter[str] = Counter()
        self.seen: dict[str, list[int]] = defaultdict(list)
        """reason -> positions of its first rows"""

    def follow(self, row_id: str) -> None:
        """ArtifactError unless rows come in the order of their ids."""
        if row_id <= self.last_id:
            raise ArtifactError(out_of_order(row_id, self.last_id))
        self.first_id = self.first_id or row_id
        self.last_id = row_id

    def stayed(
        self, split: str, source: str, language: str, masked: str, came: int, repaired: int, leaves: int, size: int
    ) -> None:
        """A row that goes out: characters as it came, once repaired, as it leaves; bytes as it leaves."""
        self._came(source, came, repaired)
        self.counts["rewritten"]["characters"] += repaired - leaves
        self.lengths[str(leaves.bit_length())] += 1
        for counts in (self.counts[split], self.sources[source][split]):
            counts["rows"] += 1
            counts["characters"] += leaves
            counts["bytes"] += size
        if language:
            self.sources[source]["languages"][language] += 1
        if masked:
            self.masked.update(json.loads(masked))

    def left(self, reason: str, source: str, position: int, came: int, repaired: int, task: str) -> None:
        """A row that leaves for this reason; `task` is the evaluation set that it was found in, or empty."""
        self._came(source, came, repaired)
        self.counts[reason]["rows"] += 1
        self.counts[reason]["characters"] += repaired
        self.sources[source]["dropped"][reason] += 1
        if task:
            self.tasks[task] += 1
        if len(self.seen[reason]) < self.examples:
            self.seen[reason].append(position)

    def _came(self, source: str, came: int, repaired: int) -> None:
        for counts in (self.counts["in"], self.sources[source]["in"]):
            counts["rows"] += 1
            counts["characters"] += came
        self.counts["normalise"]["characters"] += came - repaired

    def facts(self) -> Facts:
        """As plain values."""
        return vars(self)

    @classmethod
    def of(cls, reports: Sequence[Facts], examples: int) -> "Tally":
        """All shards together, given in their order."""
        for before, after in pairwise(reports):
            if before["last_id"] >= after["first_id"]:
                raise ArtifactError(out_of_order(after["first_id"], before["last_id"]))
        tally = cls(examples)
        for report in reports:
            _add(tally.counts, report["counts"])
            for source, counts in report["sources"].items():
                _add(tally.sources[source], counts)
            tally.lengths.update(report["lengths"])
            tally.masked.update(report["masked"])
            tally.tasks.update(report["tasks"])
            for reason, positions in report["seen"].items():
                tally.seen[reason] += positions[: examples - len(tally.seen[reason])]
        return tally

    @property
    def rows(self) -> int:
        return self.counts["in"]["rows"]

    def split(self, name: str) -> dict[str, int]:
        return {unit: self.counts[name][unit] for unit in UNITS}

    def out(self) -> dict[str, int]:
        return {unit: sum(self.counts[split][unit] for split in SPLITS) for unit in UNITS}

    def dropped(self, reasons: Iterable[str]) -> dict[str, int]:
        """Rows that left, for those of these reasons that any left for."""
        return {reason: rows for reason in reasons if (rows := self.counts[reason]["rows"])}

    def waterfall(self, reasons: Iterable[str]) -> list[dict[str, str | int]]:
        """What came in, what left at each step, what went out; `in` minus all that left is `out`, in rows and in characters."""
        steps = {name: self.counts[name] for name in ("in", "normalise", *reasons, "rewritten")} | {
            "out": Counter(self.out())
        }
        return [{"step": step, "rows": n["rows"], "characters": n["characters"]} for step, n in steps.items()]

    def by_source(self, weights: Mapping[str, float]) -> list[Facts]:
        """For each source, by name: its weight, what came in, what went out on each side, what left and why, languages."""
        return [
            {
                "name": name,
                "weight": weights.get(name, 1.0),
                **{unit: sum(self.sources[name][split][unit] for split in SPLITS) for unit in UNITS},
                "in": {unit: self.sources[name]["in"][unit] for unit in ("rows", "characters")},
                **{split: {unit: self.sources[name][split][unit] for unit in UNITS} for split in SPLITS},
                "dropped": dict(self.sources[name]["dropped"]),
                "languages": dict(self.sources[name]["languages"]),
            }
            for name in sorted({*weights, *self.sources})
        ]


def out_of_order(row_id: str, before: str) -> str:
    return f"row {row_id} stands after {before}: rows must stand in the order of their ids, each once"


def _add(counts: dict[str, Counter[str]], more: Mapping[str, Mapping[str, int]]) -> None:
    for name, numbers in more.items():
        counts[name].update(numbers)
