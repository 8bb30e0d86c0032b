"""The story of one invocation: decide, then for each stage reuse or run, hand on, publish, record. Apart, because this is
the order in which promises are kept: lease, attempt, validation, publication, and only then what MLflow is told.
"""

import contextlib
import json
import time
from dataclasses import dataclass, field

from pipelines import plan, report
from pipelines.attempt import Attempt
from pipelines.config import AppConfig, plain, redacted
from pipelines.journal import Run
from pipelines.lease import Lease
from pipelines.mistakes import ConfigError
from pipelines.plan import Step
from pipelines.session import PlanResolver, Session, Terminated, planned
from pipelines.store import Record, Store
from stages.artifacts import Artifact
from stages.contract import ResourcesUnavailable
from stages.storage.bucket import free_mb

FREE_DISK_MB = 200


@dataclass
class Outcome:
    """What one run of a pipeline came to."""

    steps: list[Step]
    executed: int = 0
    run_id: str | None = None
    headlines: dict[str, str] = field(default_factory=dict)


def run(app: AppConfig, session: Session, command: str, tags: dict[str, str] | None = None) -> Outcome:
    """Execute what is not known yet. Raises StageError, ConfigError, IntegrityError, KeyboardInterrupt or Terminated."""
    console = session.console
    steps, store = planned(app)
    outcome = Outcome(steps)
    console.plan(app.name, steps, plan.announcements(steps, app.state_root))
    if all(step.action == "reuse" for step in steps):
        console.line(f"0 of {len(steps)} stages to run: nothing changed.")
        return outcome
    _require_room(store)
    store.sweep_staging()
    if any(step.stage.ray and step.action != "reuse" for step in steps):
        session.warm_up_ray()
    name = f"{app.name} {time.strftime('%Y-%m-%d %H:%M:%S')}"
    parent = session.tracking(app.name).start_parent(name, {"raykeel.kind": "pipeline", **(tags or {})})
    outcome.run_id = parent.run_id
    status, problem = "FAILED", "an unexpected error"
    try:
        parent.log_params({"pipeline": app.name, "seed": str(app.seed), "command": command})
        parent.log_text(redacted(json.dumps(plain(app), indent=1, sort_keys=True)), "config.json")
        _Execution(app, session, store, steps, outcome, parent).all()
        status, problem = "FINISHED", ""
    except (KeyboardInterrupt, Terminated):
        status, problem = "KILLED", "stopped by a signal"
        raise
    except Exception as error:
        problem = str(error)
        raise
    finally:
        report.log(app, steps, store, parent, status, problem, command)
        parent.close(status)
        if parent.failed:
            console.warn(f"MLflow: {parent.failed}")
        with contextlib.suppress(OSError):
            store.digests.save()
    return outcome


class _Execution:
    """One pass over the steps of one run."""

    def __init__(
        self, app: AppConfig, session: Session, store: Store, steps: list[Step], outcome: Outcome, parent: Run
    ) -> None:
        self.app, self.session, self.store = app, session, store
        self.steps, self.outcome, self.parent = steps, outcome, parent
        self.resolver = PlanResolver.of(app, store)
        self.known: dict[str, str] = {}
        """Step -> content digest of its result."""

    def all(self) -> None:
        """Each step in order: decide if that had to wait, reuse or make, remember."""
        width = max(len(step.name) for step in self.steps)
        for step in self.steps:
            if step.action == "unknown":
                plan.identify(self.app, step, self.known, self.resolver)
                plan.decide_one(self.app, step, self.store, self.resolver.registry)
            if step.action == "run":
                self.outcome.executed += self._make(step, width)
            else:
                assert step.record is not None
                headline = step.record.meta.get("headline", "")
                self.session.console.line(f"= {step.name.ljust(width)}   reused  {headline}")
            assert step.record is not None
            if step.action == "reuse":
                self.parent.set_tags({f"reused.{step.name}": step.record.meta.get("run_id") or "unrecorded"})
            self.outcome.headlines[step.name] = step.record.meta.get("headline", "")
            self.known[step.name] = step.record.digest
            self.store.remember(self.app.name, step.name, step.record)

    def _make(self, step: Step, width: int) -> bool:
        """Execute a step, or take the result from a run that made it meanwhile. Whether a stage was executed."""
        console, store = self.session.console, self.store
        assert step.fingerprint is not None
        with console.stage(step.name, width) as line:
            if step.stage.ray:
                line.progress(0.0, "waiting for Ray")
                self.session.need_ray()
            with Lease.acquire(
                store.bucket,
                step.fingerprint,
                lambda who: line.progress(0.0, f"{who} is making this; waiting"),
                self.app.run.lease_timeout_s,
            ) as lease:
                record, broken = store.find(step.fingerprint)
                if broken:
                    place = store.set_aside(step.fingerprint)
                    console.warn(f"{broken}; set aside in {place} and made again")
                elif record and not step.forced and self._moved(step, record) is None:
                    step.action, step.record = "reuse", record
                    line.headline(f"made by another run meanwhile; {record.meta.get('headline', '')}")
                    return False
                attempt = Attempt(self.app, self.session, store, step, self._inputs(step), line)
                step.record = attempt.run(self.parent, lease)
                return True

    def _moved(self, step: Step, record: Record) -> str | None:
        return plan.world_moved(step, record, self.store, self.resolver.registry, self.app.state_root)

    def _inputs(self, step: Step) -> dict[str, Artifact]:
        kinds = {s.name: s.stage.output for s in self.steps}
        return {
            parameter: kinds[upstream](uri=self.store.object_uri(self.known[upstream]), digest=self.known[upstream])
            for parameter, upstream in step.cfg.inputs.items()
        }


def _require_room(store: Store) -> None:
    try:
        store.prepare()
    except OSError as error:
        raise ConfigError(
            f"store.root={store.root}: {store.scratch} cannot be written ({error.strerror}); choose another with store.root=<directory>"
        ) from error
    free = free_mb(store.scratch)
    if free < FREE_DISK_MB:
        raise ResourcesUnavailable(
            f"{store.scratch}: {free} MB free, at least {FREE_DISK_MB} MB are needed; free some or set store.root=<directory>"
        )
