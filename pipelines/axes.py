"""What a sweep varies, and how it chooses: the section `sweep` of a configuration, and Hydra's sweep grammar read into axes.
Apart from `pipelines/config.py`, which composes one invocation; here are many.
"""

import enum
import itertools
from dataclasses import dataclass, field
from typing import Any

from pipelines.mistakes import ConfigError, explain


class Sampler(enum.Enum):
    """How the points of a sweep are chosen."""

    grid = "grid"
    random = "random"
    tpe = "tpe"


class Direction(enum.Enum):
    """Which values are better."""

    minimize = "minimize"
    maximize = "maximize"


@dataclass(kw_only=True)
class PruningConfig:
    """Early end of points whose curve promises nothing (median rule)."""

    enabled: bool = False
    """Whether points are ended early."""
    metric: str = "train.validation_loss"
    """`stage.metric` with a value at several steps."""
    direction: Direction = Direction.minimize
    """Which values of that metric are better."""
    warmup_steps: int = 0
    """Steps of the metric before which no point is ended."""
    min_points: int = 3
    """Finished points that must stand behind a median."""

    def __post_init__(self) -> None:
        _require_metric("sweep.pruning.metric", self.metric)
        if self.warmup_steps < 0 or self.min_points < 1:
            raise ValueError(
                f"sweep.pruning wants warmup_steps >= 0 and min_points >= 1, got {self.warmup_steps} and {self.min_points}"
            )


@dataclass(kw_only=True)
class SweepConfig:
    """How `make sweep` chooses points and compares them. Never part of a fingerprint."""

    sampler: Sampler = Sampler.grid
    """grid: every combination; random: `trials` points drawn at random; tpe: a search that learns from the points before."""
    trials: int = 20
    """Number of points, for the samplers that draw; a finished sweep goes on when it is raised."""
    metric: str = "evaluate.bits_per_byte"
    """`stage.metric` by which points are compared; each point runs until that stage unless run.until says otherwise."""
    direction: Direction = Direction.minimize
    """Which values of that metric are better."""
    seed: int = 0
    """Seeds the choice of points: an interrupted sweep chooses what an undisturbed one would have chosen."""
    pruning: PruningConfig = field(default_factory=PruningConfig)
    """Early end of points."""

    def __post_init__(self) -> None:
        _require_metric("sweep.metric", self.metric)
        if self.trials < 1:
            raise ValueError(f"sweep.trials must be >= 1, got {self.trials}")


@dataclass(frozen=True)
class Axis:
    """One varied override: some values, or all numbers between two."""

    key: str
    values: tuple[str, ...] = ()
    """As written in an override; empty for an interval."""
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    """Whether an interval is searched by orders of magnitude."""

    @property
    def whole(self) -> bool:
        """Whether only whole numbers of the interval count: `int(interval(1,8))`."""
        return isinstance(self.low, int) and isinstance(self.high, int)


def axes_of(overrides: list[str]) -> tuple[list[str], list[Axis]]:
    """Hydra's sweep grammar -> (overrides that are the same in every point, what varies). Raises ConfigError."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import IntervalSweep
    from hydra.errors import HydraException

    try:
        fixed, axes = [], []
        for parsed in OverridesParser.create().parse_overrides(overrides):
            value: Any = parsed._value
            if not parsed.is_sweep_override():
                fixed.append(str(parsed.input_line))
            elif isinstance(value, IntervalSweep):
                axes.append(_interval(str(parsed.input_line), parsed.get_key_element(), value))
            else:
                axes.append(Axis(parsed.get_key_element(), tuple(map(str, parsed.sweep_string_iterator()))))
    except HydraException as error:
        raise ConfigError(explain(error, overrides)) from error
    return fixed, axes


def grid(axes: list[Axis]) -> list[list[str]]:
    """The overrides of every combination, in Hydra's order. Raises ConfigError for an interval."""
    for axis in axes:
        if not axis.values:
            raise ConfigError(
                f"{axis.key}: a grid has no interval; list values ({axis.key}=1,2,3), or search with sweep.sampler=tpe"
            )
    return [list(point) for point in itertools.product(*([f"{a.key}={value}" for value in a.values] for a in axes))]


def _interval(line: str, key: str, value: Any) -> Axis:
    if value.tags - {"log"}:
        raise ConfigError(f"{line}: the only tag known is log, as in {key}=tag(log,interval(1e-4,1e-2))")
    axis = Axis(key, low=value.start, high=value.end, log="log" in value.tags)
    if not axis.low < axis.high or (axis.log and axis.low <= 0):
        raise ConfigError(f"{line}: an interval goes from a smaller to a larger number, above 0 with log")
    return axis


def _require_metric(name: str, metric: str) -> None:
    stage, dot, number = metric.partition(".")
    if not (stage and dot and number):
        raise ValueError(f"{name} must be written stage.metric, for example evaluate.bits_per_byte, got {metric!r}")
