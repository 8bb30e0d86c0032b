"""What a stage costs, from its own past. Apart, because the rule must stay simple enough to be believed.

An execution is expected to cost what equal ones did: same config (resources too) and sources, inputs of nearly the same size,
whatever the seed and the code. The median of the last few; no number at all when there is none, or when most of them disagree.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

KEPT = 40
"""Executions that the history of a stage remembers."""
MEDIAN_OF = 5
NEAR = 0.10
"""Inputs whose sizes differ by less than this share count as equal: the bytes of a repeat are not known before it is made."""
STEADY = 0.30
"""An expectation is given when at least half of the executions lie within this share of their median (or within a second)."""

NO_HISTORY = "no history"


@dataclass(frozen=True)
class Expected:
    """What one execution should take."""

    seconds: float
    bytes: int

    def __str__(self) -> str:
        return f"{duration(self.seconds)}, {size(self.bytes)}"


def entry(fingerprint: str, fence: int, recipe: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """One execution as the history keeps it. `recipe`: digest of its payload without the facets that can be waived."""
    kept = {name: meta.get(name) for name in ("started_at", "seconds", "bytes", "work", "input_bytes")}
    return {"fingerprint": fingerprint, "fence": fence, "recipe": recipe, **kept}


def remember(recent: Iterable[Mapping[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The history with an execution put last; one that it knows already is not counted twice."""
    same = ("fingerprint", "fence")
    others = [dict(old) for old in recent if any(old.get(name) != new[name] for name in same)]
    return [*others, new][-KEPT:]


def expect(recent: Iterable[Mapping[str, Any]], work: str, input_bytes: int | None) -> Expected | None:
    """Median of the last equal executions, or None."""
    if input_bytes is None:
        return None
    equal = [e for e in recent if e.get("work") == work and e.get("seconds") is not None and _near(e, input_bytes)]
    equal = equal[-MEDIAN_OF:]
    if not equal:
        return None
    seconds = statistics.median(float(e["seconds"]) for e in equal)
    steady = [e for e in equal if abs(float(e["seconds"]) - seconds) <= max(STEADY * seconds, 1.0)]
    if 2 * len(steady) < len(equal):
        return None
    return Expected(seconds, round(statistics.median(int(e.get("bytes") or 0) for e in equal)))


def total(steps: Iterable[Expected | None]) -> str:
    """ "about 95 s, 12.1 MB"; "at least ..." when some have no history; "no history" when all have none."""
    steps = list(steps)
    known = [step for step in steps if step is not None]
    if not known:
        return NO_HISTORY
    everything = Expected(sum(step.seconds for step in known), sum(step.bytes for step in known))
    return f"{'about' if len(known) == len(steps) else 'at least'} {everything}"


def duration(seconds: float) -> str:
    """ "0.4 s", "95 s", "12 min", "3 h 20 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def size(number: int) -> str:
    """ "812 B", "3.4 kB", "12 MB"."""
    value, unit = float(number), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.1f} {unit}"


def _near(execution: Mapping[str, Any], input_bytes: int) -> bool:
    then = execution.get("input_bytes")
    return then is not None and abs(int(then) - input_bytes) <= NEAR * max(int(then), input_bytes)
