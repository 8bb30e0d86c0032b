"""What the record of an attempt keeps of its metrics. Apart, because a result's curves and numbers outlive its MLflow run."""

from typing import Any

CURVES = ("loss", "validation_loss")
CURVE_POINTS = 400


class Recorder:
    """The Tracker of an attempt: passes everything on and keeps the last values and the curves for the record."""

    def __init__(self, child: Any) -> None:
        self._child = child
        self.last: dict[str, float] = {}
        self._curves: dict[str, list[tuple[int, float]]] = {}
        self.log_dataset = child.log_dataset
        self.log_text = child.log_text

    def log_metrics(self, metrics: Any, step: int | None = None, at: float | None = None) -> None:
        self._child.log_metrics(metrics, step, at)
        for name, value in metrics.items():
            if value == value and abs(value) != float("inf"):
                self.last[name] = float(value)
                if name in CURVES and step is not None:
                    self._curves.setdefault(name, []).append((step, float(value)))

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """At most CURVE_POINTS points a curve, the last one always among them."""
        thin = {}
        for name, points in self._curves.items():
            stride = max(1, -(-len(points) // CURVE_POINTS))
            thin[name] = points[::stride] + ([points[-1]] if (len(points) - 1) % stride else [])
        return thin
