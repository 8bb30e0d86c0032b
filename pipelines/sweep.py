"""Many runs of a pipeline that differ in some values, and which was best: `make sweep`, `make best`. Apart from the runner, which
knows one run.

In MLflow a sweep is one run (tag raykeel.kind=sweep) and its children are its points, nothing else: each point's pipeline run,
with what varies as params and every stage's last metrics, so that all children selected compare at once. The stage attempts of
a point stand below the point, as they do below any pipeline run; a point whose stages are all known has a run of its own too.
"""

import os
import re
import shlex
import sys
import time
from typing import Any

from pipelines import log_file
from pipelines.axes import Axis, Sampler, axes_of, grid
from pipelines.commands import as_typed
from pipelines.config import AppConfig, compose
from pipelines.console import Console
from pipelines.mistakes import ConfigError
from pipelines.points import Book, Entry
from pipelines.recorder import Point, Pruned
from stages.contract import ResourcesUnavailable, StageError
from stages.storage.bucket import BucketError

ABOUT_THE_MACHINE = ("state", "cluster", "cluster.", "tracking", "tracking.", "sweep.trials")
"""Overrides by which a sweep may go on otherwise than it began."""


def sweep(console: Console, overrides: list[str], conf: str | None) -> int:
    """Make the points that are not made yet. 0: all are; 2: some failed. Raises ResourcesUnavailable when no point could be made now."""
    from pipelines import session

    name = os.environ.get("SWEEP") or None
    app = compose(axes_of(overrides)[0], conf)
    book = Book.of(app.state_root, name or time.strftime("sweep-%Y%m%d-%H%M%S"))
    with book.locked():
        overrides = _go_on(book, overrides) if book.begun else overrides
        fixed, axes = axes_of(overrides)
        app = compose(fixed, conf)
        runs = _Sweep(console, book, app, conf, fixed, axes)
        if not book.begun:
            book.ask(
                {
                    "overrides": overrides,
                    "begun": time.time(),
                    "metric": app.sweep.metric,
                    "direction": app.sweep.direction.name,
                }
            )
        log_file.start(app)
        with session.signals(), session.Session(app, console) as opened:
            return runs.all(opened)


def best(console: Console, overrides: list[str], conf: str | None) -> int:
    """Print the overrides of the winner, ready to be pasted behind `make run`, and what it came to."""
    state = compose(overrides, conf).state_root
    name = os.environ.get("SWEEP")
    book = Book.of(state, name).existing() if name else Book.latest(state)
    winner, metric = book.best(), book.question["metric"]
    if winner is None:
        raise ConfigError(f"{book.name}: no point has a value of {metric} yet")
    fixed, _ = axes_of(book.question["overrides"])
    kept = [o for o in fixed if not o.startswith("sweep.")]
    # Straight to stdout: a line to copy is not wrapped.
    sys.stdout.write(shlex.join([*kept, *(f"{key}={value}" for key, value in winner.varied.items())]) + "\n")
    sys.stdout.write(f"{metric} = {winner.value:.6g} ({book.name}, point {winner.number} of {len(book.entries())})\n")
    return 0


class _Sweep:
    """One pass over the points of a sweep."""

    def __init__(
        self, console: Console, book: Book, app: AppConfig, conf: str | None, fixed: list[str], axes: list[Axis]
    ) -> None:
        """Raises ConfigError for what no point could be made of."""
        self.console, self.book, self.app, self.conf = console, book, app, conf
        self.cfg, self.axes, self.fixed = app.sweep, axes, fixed
        target = self.cfg.metric.partition(".")[0]
        if target not in app.stages and (self.cfg.sampler is not Sampler.grid or self.cfg.pruning.enabled):
            raise ConfigError(
                f"sweep.metric={self.cfg.metric}: {app.name} has no stage {target}; there are: {', '.join(app.stages)}"
            )
        if target in app.stages and app.run.until is None:
            self.fixed = [*fixed, f"run.until={target}"]
            console.line(f"each point runs until {target}; say run.until=<stage> for more")
        if not axes and self.cfg.sampler is not Sampler.grid:
            raise ConfigError(
                f"sweep.sampler={self.cfg.sampler.name} has nothing to choose: give a value an interval(...)"
            )
        self.points = grid(axes) if self.cfg.sampler is Sampler.grid else None
        for point in self.points if self.points is not None else [self._first()]:
            compose([*self.fixed, *point], conf)

    def _first(self) -> list[str]:
        from pipelines.search import propose

        return propose(self.cfg, self.axes, [], 1)

    @property
    def count(self) -> int:
        return len(self.points) if self.points is not None else self.cfg.trials

    def all(self, session: Any) -> int:
        """Every point that has not ended well, in order. A point that fails does not end the sweep; a server or cluster that is away,
        or a full disk, does: every further point would fail as well."""
        tracking = session.tracking(self.app.name)
        journal = self.book.question.get("journal")
        tags = {"raykeel.kind": "sweep", "raykeel.sweep": self.book.name}
        above = tracking.start_parent(self.book.name, tags, journal=journal)
        self.book.ask({**self.book.question, "journal": above.journal})
        above.log_params({"sampler": self.cfg.sampler.name, "metric": self.cfg.metric})
        status = "FAILED"
        try:
            for number in range(1, self.count + 1):
                ended = {entry.number: entry for entry in self.book.entries()}
                if number in ended and ended[number].state != "failed":
                    continue
                again = ended[number].varied if number in ended else None
                told = tracking.ended_point(above.run_id, number) if journal and above.run_id else None
                self.book.write(self._point(session, above, number, self._varied(number, again), told))
            failed = [entry for entry in self.book.entries() if entry.state == "failed"]
            status = "FAILED" if failed else "FINISHED"
        except BaseException as error:
            if not isinstance(error, Exception):  # a signal
                status = "KILLED"
            raise
        finally:
            above.log_text(self._table(), "points.md")
            above.set_tags({"mlflow.note.content": self._table()})
            above.close(status)
            if above.failed:
                self.console.warn(f"MLflow: {above.failed}")
        self._tell()
        return 2 if failed else 0

    def _varied(self, number: int, again: dict[str, str] | None) -> dict[str, str]:
        """What point `number` sets; a failed point is made again as it was."""
        if again is not None:
            return again
        if self.points is not None:
            chosen = self.points[number - 1]
        else:
            from pipelines.search import propose

            chosen = propose(self.cfg, self.axes, self.book.entries(), number)
        return {key: value for key, _, value in (override.partition("=") for override in chosen)}

    def _point(self, session: Any, above: Any, number: int, varied: dict[str, str], told: Any) -> Entry:
        """Run one point to its end, whatever that is. Signals pass. `told`: tags of its run in MLflow when that came to its end before."""
        from pipelines import runner

        typed = [*self.fixed, *(f"{key}={value}" for key, value in varied.items())]
        entry = Entry(number, varied, "failed")
        self.console.line(f"\npoint {number} of {self.count}: {entry.shown}")
        if told and "raykeel.pruned" in told:
            return Entry(number, varied, "pruned", error=told["raykeel.pruned"])
        pruner = self._pruner()
        params = {re.sub(r"[^\w.:/ -]", "_", key.lstrip("+")): value for key, value in varied.items()}
        point = Point(f"point {number}", above, params, pruner.should_stop if pruner else None)
        tags = {"raykeel.sweep": self.book.name, "raykeel.point": str(number)}
        curve = pruner.curve if pruner else {}
        session.point = point
        try:
            app = compose(typed, self.conf)
            outcome = runner.run(app, session, as_typed("run", typed), tags)
            metrics = runner.final_metrics(outcome.steps)
            if outcome.run_id is None and not outcome.executed and not told:
                _record_known(session, app, point, tags, metrics)
            curve = curve or self._known_curve(outcome.steps)
            value = self._value(app, metrics)
            return Entry(number, varied, "done", value, metrics, sorted(curve.items()))
        except Pruned as error:
            self.console.line(f"point {number} ended early: {error}")
            return Entry(number, varied, "pruned", curve=sorted(curve.items()), error=str(error))
        except Exception as error:
            if _is_everybodys(error):
                raise ResourcesUnavailable(
                    f"point {number} of {self.count} ({entry.shown}): {error}; it and those after it are still to be made: "
                    f"make sweep SWEEP={self.book.name} goes on with it"
                ) from error
            said = str(error) if isinstance(error, StageError | ConfigError) else f"{type(error).__name__}: {error}"
            self.console.warn(f"point {number} failed: {said}")
            return Entry(number, varied, "failed", error=said)
        finally:
            session.point = None

    def _pruner(self) -> Any:
        if not self.cfg.pruning.enabled:
            return None
        from pipelines.search import Pruner

        return Pruner(self.cfg.pruning, self.book.entries())

    def _known_curve(self, steps: list[Any]) -> dict[int, float]:
        """The curve of a stage whose result was known, from its record."""
        stage, _, metric = self.cfg.pruning.metric.partition(".")
        for step in steps:
            if step.name == stage and step.record:
                return {int(s): float(v) for s, v in (step.record.meta.get("curves") or {}).get(metric, [])}
        return {}

    def _value(self, app: AppConfig, metrics: dict[str, float]) -> float | None:
        """None where the points do not reach the stage that has the metric. Raises StageError when it says nothing."""
        if self.cfg.metric in metrics:
            return metrics[self.cfg.metric]
        stage = self.cfg.metric.partition(".")[0]
        said = sorted(name for name in metrics if name.startswith(f"{stage}."))
        if said:
            raise StageError(f"no finite {self.cfg.metric}; {stage} has: {', '.join(said)}")
        return None

    def _table(self) -> str:
        winner = self.book.best()
        rows = [f"| point | varied | {self.cfg.metric} |", "| --- | --- | --- |"]
        for entry in self.book.entries():
            said = f"{entry.value:.6g}" if entry.value is not None else (entry.error or entry.state)
            mark = " (best)" if winner and entry.number == winner.number else ""
            rows.append(f"| {entry.number}{mark} | `{entry.shown}` | {said.replace('|', '/')[:200]} |")
        return "\n".join(rows)

    def _tell(self) -> None:
        winner = self.book.best()
        rows = []
        for entry in self.book.entries():
            said = f"{self.cfg.metric} = {entry.value:.6g}" if entry.value is not None else entry.state
            if entry.state != "done":
                said = f"{entry.state}: {entry.error}"
            rows.append((entry.shown, said + ("   best" if winner and entry.number == winner.number else "")))
        self.console.line(f"\n{self.book.name} (in the MLflow UI: the run of that name; its children are the points)")
        self.console.table(rows)
        failed = sum(entry.state == "failed" for entry in self.book.entries())
        if failed:
            self.console.line(f"{failed} failed: make sweep SWEEP={self.book.name} runs them again, and only them")
        if winner:
            self.console.line(f"the winner's overrides: make best SWEEP={self.book.name}")


def _is_everybodys(error: BaseException) -> bool:
    """Whether it is no trouble of this point's own: what it needs is away, or a disk is full."""
    from pipelines import room

    seen: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in seen:
        seen.append(one)
        one = one.__cause__ or one.__context__
    return isinstance(error, ResourcesUnavailable | BucketError) or any(room.is_full(one) for one in seen)


def _go_on(book: Book, typed: list[str]) -> list[str]:
    """The overrides of a sweep that was begun before, with what was typed now in their place. Raises ConfigError."""
    asked: list[str] = book.question["overrides"]
    merged = {override.partition("=")[0]: override for override in asked}
    for override in typed:
        key = override.partition("=")[0]
        about_the_machine = any(
            key == name or (name.endswith(".") and key.startswith(name)) for name in ABOUT_THE_MACHINE
        )
        if merged.get(key) != override and not about_the_machine:
            raise ConfigError(
                f"SWEEP={book.name} was begun with {shlex.join(asked)}, without {override}: leave the overrides out to go on with "
                "it, or choose another name"
            )
        merged[key] = override
    return list(merged.values())


def _record_known(session: Any, app: AppConfig, point: Point, tags: dict[str, str], metrics: dict[str, float]) -> None:
    """A point that had nothing to run still has its line in MLflow's comparison."""
    run = session.tracking(app.name).start_parent(
        point.name, {"raykeel.kind": "pipeline", "raykeel.reused": "all", **tags}, point.sweep
    )
    run.log_params({"pipeline": app.name, "seed": str(app.seed), **point.params})
    run.log_metrics(metrics)
    run.close("FINISHED")
