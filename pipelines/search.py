"""Choosing points and ending hopeless ones, with optuna. Apart from the sweep, because optuna remembers nothing here: each question
is answered from the sweep's own list of points, so that an interrupted sweep chooses what an undisturbed one would have chosen.
"""

import math
import threading
from typing import Any

from pipelines.axes import Axis, PruningConfig, Sampler, SweepConfig
from pipelines.points import Entry


def propose(cfg: SweepConfig, axes: list[Axis], before: list[Entry], number: int) -> list[str]:
    """The varied overrides of point `number`, given those with smaller numbers."""
    optuna = _optuna()
    seed = cfg.seed * 1_000_003 + number
    sampler = {Sampler.random: optuna.samplers.RandomSampler, Sampler.tpe: optuna.samplers.TPESampler}[cfg.sampler](
        seed=seed
    )
    study = optuna.create_study(sampler=sampler, direction=cfg.direction.name)
    space = {axis.key: _distribution(axis) for axis in axes}
    for entry in before:
        if entry.number >= number or entry.varied.keys() != space.keys():
            continue
        done = entry.state == "done" and entry.value is not None
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.COMPLETE if done else _ended(optuna, entry),
                value=entry.value if done else None,
                params={key: _read(space[key], value) for key, value in entry.varied.items()},
                distributions=space,
            )
        )
    chosen = study.ask(space).params
    return [f"{axis.key}={chosen[axis.key]}" for axis in axes]


class Pruner:
    """Listens to the curve of one point and says when it is worse than the median of those before it."""

    def __init__(self, cfg: PruningConfig, before: list[Entry]) -> None:
        optuna = _optuna()
        rule = optuna.pruners.MedianPruner(n_startup_trials=cfg.min_points, n_warmup_steps=cfg.warmup_steps)
        self._cfg = cfg
        self._lock = threading.Lock()  # stages that run side by side speak from threads of their own
        self._study = optuna.create_study(pruner=rule, direction=cfg.direction.name)
        for entry in before:
            if entry.state == "done" and entry.curve:
                complete = optuna.trial.create_trial(value=0.0, intermediate_values=dict(entry.curve))
                self._study.add_trial(complete)
        self._trial = self._study.ask()
        self.curve: dict[int, float] = {}

    def should_stop(self, metric: str, step: int, value: float) -> str | None:
        """Why the point is to end here, or None."""
        if metric != self._cfg.metric or not math.isfinite(value):
            return None
        with self._lock:
            if step in self.curve:  # a retried attempt tells its curve once more
                return None
            self.curve[step] = value
            self._trial.report(value, step)
            if not self._trial.should_prune():
                return None
        return f"{metric} = {value:.6g} at step {step} is worse than the median of the points before it"


def _distribution(axis: Axis) -> Any:
    distributions = _optuna().distributions
    if axis.values:
        return distributions.CategoricalDistribution(axis.values)
    if axis.whole:
        return distributions.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return distributions.FloatDistribution(axis.low, axis.high, log=axis.log)


def _read(distribution: Any, value: str) -> Any:
    """The value of an override as optuna had chosen it."""
    kind = type(distribution).__name__
    return {"IntDistribution": int, "FloatDistribution": float}.get(kind, str)(value)


def _ended(optuna: Any, entry: Entry) -> Any:
    states = optuna.trial.TrialState
    return states.PRUNED if entry.state == "pruned" else states.FAIL


def _optuna() -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
