"""One schema for every result, and the arithmetic behind a verdict. Apart from the benches, so that none of them invents
its own statistics: a bench hands over raw numbers, this file decides what may be said about them.

Two shapes share all fields. Pairs: two arms measured A B, B A, ... and compared by their ratio B/A. Values: one quantity
measured one or more times and held against a limit. What a shape has not is null.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine

SCHEMA = 1
RESAMPLES = 10_000
BOOTSTRAP_FROM = 6
"""Below this many pairs a bootstrap covers too little; a t-interval on logarithms is used and the level is "indicative"."""
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
"""Student's t, 97.5 %, by degrees of freedom."""
CHECKPOINT_MB = 1024
BUSY_LIMIT, STEAL_LIMIT = 0.25, 0.05
"""Share of all cores that others may use at the start, and that the hypervisor may take during a bench."""


@dataclass(frozen=True)
class Pair:
    """One measurement of each arm, in the order they were taken ("AB" or "BA")."""

    order: str
    a: float
    b: float


@dataclass(frozen=True)
class Check:
    """A condition without which a number means nothing: equal results, equal environment, quiet machine."""

    name: str
    holds: bool
    found: str


@dataclass(kw_only=True)
class Result:
    """What `results/<name>.json` holds."""

    name: str
    bench: str
    """The module that made it."""
    question: str
    unit: str
    better: str
    """ "higher" or "lower": which direction of the number is good."""
    arms: dict[str, str] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    ratio: float | None = None
    """Geometric mean of B/A over the pairs."""
    interval: tuple[float, float] | None = None
    """95 % interval of the ratio."""
    floor_pairs: list[Pair] = field(default_factory=list)
    """The same harness with arm A on both sides."""
    floor: float | None = None
    """Half width of the A/A interval, as a share: differences below it are noise."""
    margin: float | None = None
    """Share within which two arms count as equal; fixed before anything was measured."""
    values: list[float] = field(default_factory=list)
    median: float | None = None
    limit: float | None = None
    """Of the ratio (pairs) or of the median (values)."""
    limit_met: bool | None = None
    gate: list[Check] = field(default_factory=list)
    level: str = "measured"
    """ "measured", or "indicative" when the pairs are too few for more."""
    verdict: str = ""
    """EQUIVALENT FASTER SLOWER SMALL UNDECIDED (pairs), PASS FAIL INFO (values), INVALID (a check of the gate failed)."""
    details: dict[str, Any] = field(default_factory=dict)
    background: dict[str, float] = field(default_factory=dict)
    """load_average and busy share of the cores at the start, steal share during the bench."""
    environment: dict[str, Any] = field(default_factory=dict)
    date: str = ""
    quick: bool = False
    schema: int = SCHEMA


class Bench:
    """What a bench is given: its sizes, a voice, and the two ways to make a Result."""

    def __init__(
        self,
        name: str,
        *,
        quick: bool,
        pairs: int | None,
        background: Mapping[str, float],
        megabytes: int = CHECKPOINT_MB,
    ) -> None:
        """`background` is what `machine.wait_quiet` found; `megabytes` is the size of a large checkpoint."""
        self.name, self.quick, self._pairs, self.megabytes = name, quick, pairs, megabytes
        self._started = time.monotonic()
        self._cpu = machine.CpuTimes.now()
        self._background = dict(background)

    def pairs(self, default: int, quick: int = 2) -> int:
        """How many pairs: as typed, else the bench's own number."""
        return self._pairs or (quick if self.quick else default)

    def say(self, text: str) -> None:
        print(f"  {time.monotonic() - self._started:6.1f} s  {self.name}: {text}", flush=True)

    def alternate(self, count: int, a: Callable[[], float], b: Callable[[], float], what: str = "pair") -> list[Pair]:
        """Measure pairs A B, B A, A B, ...: drift of the machine favours neither arm."""
        pairs = []
        for index in range(count):
            order = "AB" if index % 2 == 0 else "BA"
            found = {arm: (a if arm == "A" else b)() for arm in order}
            pairs.append(Pair(order, found["A"], found["B"]))
            self.say(f"{what} {index + 1} of {count}: A {found['A']:.4g}, B {found['B']:.4g}")
        return pairs

    def compare(
        self,
        name: str,
        question: str,
        *,
        unit: str,
        better: str,
        arms: Mapping[str, str],
        pairs: Sequence[Pair],
        floor_pairs: Sequence[Pair] = (),
        margin: float,
        limit: float | None = None,
        gate: Sequence[Check] = (),
        details: Mapping[str, Any] | None = None,
    ) -> Result:
        """A Result of two arms."""
        ratio, interval = ratio_of(pairs)
        floor = None
        if floor_pairs:
            _, around = ratio_of(floor_pairs)
            floor = math.expm1(max(abs(math.log(edge)) for edge in around)) if around else None
        checks = [*gate, *self._checks()]
        verdict = paired_verdict(ratio, interval, floor, margin, better)
        met = None if limit is None else (ratio >= limit if better == "higher" else ratio <= limit)
        return self._result(
            name=name,
            question=question,
            unit=unit,
            better=better,
            arms=dict(arms),
            pairs=list(pairs),
            ratio=ratio,
            interval=interval,
            floor_pairs=list(floor_pairs),
            floor=floor,
            margin=margin,
            limit=limit,
            limit_met=met,
            gate=checks,
            level="measured" if len(pairs) >= BOOTSTRAP_FROM else "indicative",
            verdict=verdict if all(check.holds for check in checks) else "INVALID",
            details=dict(details or {}),
        )

    def value(
        self,
        name: str,
        question: str,
        *,
        unit: str,
        better: str = "lower",
        values: Sequence[float],
        limit: float | None = None,
        needs_quiet: bool = True,
        gate: Sequence[Check] = (),
        details: Mapping[str, Any] | None = None,
    ) -> Result:
        """A Result of one quantity. A limit kept on a busy machine is kept; one that is broken there proves nothing,
        unless the quantity does not depend on how busy the machine is (`needs_quiet` false)."""
        median = statistics.median(values)
        met = None if limit is None else (median >= limit if better == "higher" else median <= limit)
        checks, quiet = list(gate), self._checks()
        verdict = "INFO" if met is None else "PASS" if met else "FAIL"
        needed = checks if met or not needs_quiet else [*checks, *quiet]
        return self._result(
            name=name,
            question=question,
            unit=unit,
            better=better,
            values=list(values),
            median=median,
            limit=limit,
            limit_met=met,
            gate=[*checks, *quiet],
            verdict=verdict if all(check.holds for check in needed) else "INVALID",
            details=dict(details or {}),
        )

    def _checks(self) -> list[Check]:
        self._background["steal"] = round(self._cpu.steal_since(), 4)
        busy, steal = self._background["busy"], self._background["steal"]
        return [
            Check("the machine was idle at the start", busy <= BUSY_LIMIT, f"{busy:.0%} of the cores in use"),
            Check("the cores were ours", steal <= STEAL_LIMIT, f"{steal:.1%} stolen by the hypervisor"),
        ]

    def _result(self, **values: Any) -> Result:
        return Result(
            **values,
            bench=self.name,
            background=dict(self._background),
            environment=machine.environment(),
            date=time.strftime("%Y-%m-%d"),
            quick=self.quick,
        )


def ratio_of(pairs: Sequence[Pair]) -> tuple[float, tuple[float, float] | None]:
    """(geometric mean of B/A, its 95 % interval; None for a single pair)."""
    logs = [math.log(pair.b / pair.a) for pair in pairs]
    mean, n = statistics.fmean(logs), len(logs)
    if n < 2:
        return math.exp(mean), None
    if n < BOOTSTRAP_FROM:
        half = T_975[n - 1] * statistics.stdev(logs) / math.sqrt(n)
        return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))
    import numpy

    sample = numpy.random.default_rng(0).choice(numpy.asarray(logs), size=(RESAMPLES, n)).mean(axis=1)
    low, high = numpy.percentile(sample, [2.5, 97.5])
    return math.exp(mean), (math.exp(low), math.exp(high))


def medians(pairs: Sequence[Pair]) -> dict[str, float]:
    """The middle of each arm, for the details of a comparison."""
    return {"median_a": statistics.median(p.a for p in pairs), "median_b": statistics.median(p.b for p in pairs)}


def paired_verdict(
    ratio: float, interval: tuple[float, float] | None, floor: float | None, margin: float, better: str
) -> str:
    """What may be said of B against A. "Not different" is never "equal": equality needs the interval inside the margin."""
    if interval is None:
        return "UNDECIDED"
    low, high = interval
    inside = (1 / (1 + margin), 1 + margin)
    if inside[0] <= low and high <= inside[1]:
        return "EQUIVALENT"
    if low <= 1 <= high or (floor is not None and abs(math.log(ratio)) <= math.log1p(floor)):
        return "UNDECIDED"
    if inside[0] < high and low < inside[1]:
        return "SMALL"
    return "FASTER" if (ratio > 1) == (better == "higher") else "SLOWER"


def write(result: Result, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{result.name}.json"
    path.write_text(json.dumps(asdict(result), indent=1, sort_keys=True) + "\n", "utf-8")
    return path


def summary(result: Mapping[str, Any]) -> str:
    """One line for a table: `0.991 [0.982, 1.003] EQUIVALENT` or `101 s (limit 240) PASS`."""
    if result["ratio"] is not None:
        around = f" [{number(result['interval'][0])}, {number(result['interval'][1])}]" if result["interval"] else ""
        few = ", indicative" if result["level"] == "indicative" else ""
        return f"{number(result['ratio'])}{around} {result['verdict']}{few}"
    limit = f" (limit {number(result['limit'])})" if result["limit"] is not None else ""
    verdict = "" if result["verdict"] == "INFO" else f" {result['verdict']}"
    return f"{number(result['median'])} {result['unit']}{limit}{verdict}"


def number(value: float) -> str:
    """Three significant digits, never in exponent form."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"
