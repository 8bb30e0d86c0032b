"""What the record of an attempt keeps of its metrics, and who else listens to them. Apart, because a result's curves and numbers
outlive its MLflow run, and a sweep may end a point by what its curve says.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelines.journal import Run
from stages.contract import StageError

CURVES = ("loss", "validation_loss")
CURVE_POINTS = 400


class Pruned(StageError):
    """A sweep ended the attempt early, because its curve promised nothing. No failure: the MLflow run is KILLED."""


@dataclass(frozen=True)
class Point:
    """What a sweep asks of one of its runs."""

    name: str
    """What MLflow calls it."""
    sweep: Run
    """The run above it in MLflow."""
    params: Mapping[str, str] = field(default_factory=dict)
    """What varies between the points."""
    should_stop: Callable[[str, int, float], str | None] | None = None
    """`(stage.metric, step, value)` -> why the point is to end here, or None."""


MACHINE = "system/"
"""Prefix of metrics that tell of a machine, as MLflow writes it."""


class Recorder:
    """The Tracker of an attempt: passes everything on and keeps the last values and the curves for the record."""

    def __init__(self, child: Any, stage: str = "", point: Point | None = None) -> None:
        self._child = child
        self._stage = stage
        self._should_stop = point.should_stop if point else None
        self.last: dict[str, float] = {}
        self._curves: dict[str, list[tuple[int, float]]] = {}
        self.log_dataset = child.log_dataset
        self.log_text = child.log_text

    def log_metrics(self, metrics: Any, step: int | None = None, at: float | None = None) -> None:
        """Raises Pruned when the sweep has seen enough."""
        self._child.log_metrics(metrics, step, at)
        for name, value in metrics.items():
            if name.startswith(MACHINE):  # the child's own page shows it; a record and a comparison are of results
                continue
            if value == value and abs(value) != float("inf"):
                self.last[name] = float(value)
                if name in CURVES and step is not None:
                    self._curves.setdefault(name, []).append((step, float(value)))
        if self._should_stop and step is not None:
            for name, value in metrics.items():
                if why := self._should_stop(f"{self._stage}.{name}", step, float(value)):
                    raise Pruned(f"{self._stage}: {why}")

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """At most CURVE_POINTS points a curve, the last one always among them."""
        thin = {}
        for name, points in self._curves.items():
            stride = max(1, -(-len(points) // CURVE_POINTS))
            thin[name] = points[::stride] + ([points[-1]] if (len(points) - 1) % stride else [])
        return thin
