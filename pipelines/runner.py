"""The story of one invocation: decide, then for each stage reuse or run, hand on, publish, record. Apart, because this is the order in
which promises are kept: what is needed is in the ledger before it is relied on; then lease, attempt, validation, publication, and only
then what MLflow is told.
"""

import contextlib
import itertools
import json
import logging
import shutil
import threading
import time
import uuid
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pipelines import cluster, ledger, plan, report, room
from pipelines.attempt import Attempt
from pipelines.config import AppConfig, OnFailure, plain, redacted
from pipelines.console import Console, StageLine
from pipelines.journal import Run
from pipelines.lease import Lease, LeaseLost
from pipelines.mistakes import ConfigError
from pipelines.plan import Step
from pipelines.pool import MayPass
from pipelines.recorder import Pruned
from pipelines.schedule import Schedule, Share
from pipelines.session import PlanResolver, Session, Terminated, planned
from pipelines.store import IntegrityError, Record, Store
from pipelines.turns import Turns, once
from stages.artifacts import Artifact, ArtifactError, DamagedArtifact
from stages.contract import ResourcesUnavailable, StageError

RETRY_WAIT_LIMIT_S = 60.0
STOP_PATIENCE_S = 12.0
"""For all running steps together: their workers get 8 s, MLflow 3 s."""


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
    console.plan(app.name, steps, plan.announcements(app, steps))
    if all(step.action == "reuse" for step in steps):
        console.line(f"0 of {len(steps)} stages to run: nothing changed.")
        session.tidy(app.name)
        return outcome
    plan.read_code(steps)
    room.require(app, store, ray=_needs_ray(steps))
    plan.require_memory(app, steps)
    turns = Turns(store, app.run.lease_timeout_s)
    entry = ledger.Entry(store, app, command, tags or {}, steps)
    try:
        steps = outcome.steps = _confirmed(app, console, store, turns, entry, steps)
        store.sweep_staging()
        session.warm_up(ray=_needs_ray(steps))
        name = session.point.name if session.point else f"{app.name} {time.strftime('%Y-%m-%d %H:%M:%S')}"
        parent = session.tracking(app.name).start_parent(
            name, {"raykeel.kind": "pipeline", **(tags or {})}, session.point.sweep if session.point else None
        )
    except BaseException:
        with contextlib.suppress(OSError):
            entry.withdraw()
        raise
    outcome.run_id = parent.run_id
    _Execution(app, session, store, steps, outcome, parent, entry, turns).told(command)
    return outcome


def _needs_ray(steps: list[Step]) -> bool:
    return any(step.needs_ray and step.action != "reuse" for step in steps)


def _confirmed(
    app: AppConfig, console: Console, store: Store, turns: Turns, entry: ledger.Entry, steps: list[Step]
) -> list[Step]:
    """The plan, with what it reuses still there now that the ledger says who needs it; made anew when something went meanwhile."""
    while True:
        turns.wait(once(console))
        gone = [step.name for step in steps if step.record is not None and not _stands(store, step.record)]
        if not gone:
            return steps
        console.warn(f"{', '.join(gone)}: gone since the plan was made; planned anew")
        steps, _ = planned(app)
        entry.renew(steps)
        console.plan(app.name, steps, plan.announcements(app, steps))


def _stands(store: Store, record: Record) -> bool:
    found, _ = store.find(record.fingerprint)
    return found is not None and found.digest == record.digest


def final_metrics(steps: list[Step]) -> dict[str, float]:
    """`stage.metric` -> last value, of results made now and reused alike: what runs are compared by."""
    known = [(step.name, step.record.meta.get("metrics") or {}) for step in steps if step.record]
    return {f"{stage}.{name}": value for stage, metrics in known for name, value in metrics.items()}


class _Execution:
    """One pass over the steps of one run."""

    def __init__(
        self,
        app: AppConfig,
        session: Session,
        store: Store,
        steps: list[Step],
        outcome: Outcome,
        parent: Run,
        entry: ledger.Entry,
        turns: Turns,
    ) -> None:
        self.app, self.session, self.store = app, session, store
        self.outcome, self.parent, self.entry, self.turns = outcome, parent, entry, turns
        self.steps = {step.name: step for step in steps}
        self.width = max(len(step.name) for step in steps)
        self.resolver = PlanResolver.of(app, store)
        self.schedule = Schedule(session.cpus, app.run.max_parallel)
        self.waiting = list(self.steps)
        self.known: dict[str, str] = {}
        """Step -> content digest of its result."""
        self.failed: dict[str, BaseException] = {}
        self.skipped: dict[str, str] = {}
        """Step -> the failed one that it would have needed."""
        self.condemning = threading.Lock()

    def told(self, command: str) -> None:
        """All of it, and how it ended told to MLflow and to the ledger."""
        app, parent = self.app, self.parent
        status, problem = "FAILED", "an unexpected error"
        try:
            varied = self.session.point.params if self.session.point else {}
            parent.log_params({"pipeline": app.name, "seed": str(app.seed), "command": command, **varied})
            parent.log_text(redacted(json.dumps(plain(app), indent=1, sort_keys=True)), "config.json")
            self.all()
            parent.log_metrics(final_metrics(self.outcome.steps))
            status, problem = "FINISHED", ""
        except (KeyboardInterrupt, Terminated):
            status, problem = "KILLED", "stopped by a signal"
            raise
        except Pruned as error:
            status, problem = "KILLED", str(error)
            parent.set_tags({"raykeel.pruned": str(error)})
            raise
        except Exception as error:
            problem = str(error)
            raise
        finally:
            self._end(status, problem, command)

    def _end(self, status: str, problem: str, command: str) -> None:
        """Whatever goes wrong here hides neither how the run ended nor that it did."""
        console, parent = self.session.console, self.parent
        try:
            report.log(self.app, self.outcome.steps, self.store, parent, status, problem, command)
        except Exception as error:
            logging.getLogger(__name__).warning("no report", exc_info=error)
            console.warn(f"the report was not written: {redacted(f'{type(error).__name__}: {error}')}")
        finally:
            parent.close(status)
            if parent.failed:
                console.warn(f"MLflow: {parent.failed}")
            with contextlib.suppress(OSError):
                self.store.digests.save()
                self.entry.end(status, problem, parent.run_id)

    def all(self) -> None:
        """Start what can start, settle what ended, until nothing is left. Raises what the first failed step raised."""
        try:
            self._begin()
            while self.schedule.running:
                for name, executed, error in self.schedule.ended():
                    if error is None:
                        self.outcome.executed += executed
                        self._settle(self.steps[name])
                    else:
                        self._fail(name, error)
                self._begin()
        except BaseException as error:
            if not isinstance(error, Exception):
                cluster.give_up()
            for name in self.schedule.running:
                self.steps[name].failure = plan.STOPPED
            self.schedule.stop(STOP_PATIENCE_S)
            raise
        if self.failed:
            self._report_failures()
            raise next(iter(self.failed.values()))

    def _begin(self) -> None:
        """Everything that can start now, in the order of the pipeline; what is known is settled without starting anything."""
        for name in list(self.waiting):
            step = self.steps[name]
            lost = [up for up in step.cfg.inputs.values() if up in self.failed or up in self.skipped]
            if lost:
                self.waiting.remove(name)
                self.skipped[name] = self.skipped.get(lost[0], lost[0])
            elif self.failed and self.app.run.on_failure is OnFailure.stop:
                continue
            elif all(up in self.known for up in step.cfg.inputs.values()):
                self._begin_one(step)

    def _begin_one(self, step: Step) -> None:
        try:
            if step.action == "unknown":
                plan.identify(self.app, step, self.known, self.resolver)
                self._decide(step)
            if step.action == "reuse":
                self.waiting.remove(step.name)
                assert step.record is not None
                headline = step.record.meta.get("headline", "")
                self.session.console.line(f"= {step.name.ljust(self.width)}   reused  {headline}")
                self._settle(step)
            elif self.schedule.start(step.name, step.cfg.resources.cpus_wanted(), partial(self._make, step)):
                self.waiting.remove(step.name)
        except Exception as error:  # a source that went away meanwhile: this step's trouble, not its siblings'
            self.waiting.remove(step.name)
            self._fail(step.name, error)

    def _decide(self, step: Step) -> None:
        """Noted first and looked at then: so either `make gc` knows that it is needed, or we know that it collects."""
        noted = None
        while True:
            self.entry.note(step.name, step.fingerprint, noted)
            self.turns.wait(once(self.session.console))
            plan.decide_one(self.app, step, self.store, self.resolver.registry)
            if not step.accepted or step.record is None or step.record.digest == noted:
                return
            noted = step.record.digest  # of another recipe: its fingerprint alone would not keep it

    def _settle(self, step: Step) -> None:
        """Its result is known: hand it on, remember it."""
        assert step.record is not None
        if step.action == "reuse":
            self.parent.set_tags({f"reused.{step.name}": step.record.meta.get("run_id") or "unrecorded"})
        self.outcome.headlines[step.name] = step.record.meta.get("headline", "")
        self.known[step.name] = step.record.digest
        self.entry.note(step.name, step.fingerprint, step.record.digest)
        self.store.remember(self.app.name, step.name, step.record)

    def _fail(self, name: str, error: BaseException) -> None:
        if not isinstance(error, Exception):
            raise error
        self.failed[name] = error
        self.steps[name].failure = str(error)

    def _report_failures(self) -> None:
        console, first = self.session.console, next(iter(self.failed))
        for name, error in self.failed.items():
            if name != first:
                console.warn(f"{name} failed too: {error}")
        for name, cause in self.skipped.items():
            console.line(f"- {name.ljust(self.width)}   skipped: {cause} failed")
        for name in self.waiting:
            console.line(f"- {name.ljust(self.width)}   not started (run.on_failure=continue would go on with it)")
        self.parent.set_tags({f"skipped.{name}": f"{cause} failed" for name, cause in self.skipped.items()})

    def _make(self, step: Step, share: Share) -> bool:
        """In a thread: execute a step, or take the result from a run that made it meanwhile. Whether it was executed."""
        console, store = self.session.console, self.store
        assert step.fingerprint is not None
        with console.stage(step.name, self.width) as line, self._lease(step, share, line) as lease:
            record, broken = store.find(step.fingerprint)
            if broken:
                place = store.set_aside(step.fingerprint)
                console.warn(f"{broken}; set aside in {place} and made again")
            elif record and not step.forced and self._moved(step, record) is None:
                step.action, step.record = "reuse", record
                line.headline(f"made by another run meanwhile; {record.meta.get('headline', '')}")
                return False
            # A forced execution must not continue what an earlier one of the same recipe left half done.
            work = store.work(step.fingerprint + (f"-{uuid.uuid4().hex[:8]}" if step.forced else ""))
            try:
                step.record = self._attempts(step, share, line, lease, work)
            except DamagedArtifact as error:
                self._condemn_broken_inputs(step, error)
                raise
            finally:
                if step.forced:
                    shutil.rmtree(work, ignore_errors=True)
            return True

    def _lease(self, step: Step, share: Share, line: StageLine) -> Lease:
        """The right to make this result. Its CPUs are for others while another run has it."""
        assert step.fingerprint is not None

        def waiting(what: str, who: str) -> None:
            share.lend()
            share.rest(0.0)
            line.progress(0.0, f"{who} {what}; waiting")

        made = partial(waiting, "is making this")
        lease = Lease.acquire(self.store.bucket, step.fingerprint, made, self.app.run.lease_timeout_s)
        try:
            self.turns.wait(partial(waiting, "collects in this store"))
            share.reclaim()
        except BaseException:
            lease.release()
            raise
        return lease

    def _attempts(self, step: Step, share: Share, line: StageLine, lease: Lease, work: Path) -> Record:
        """One attempt, and further ones after failures that may pass. The lease is held over all of them."""
        wanted = step.cfg.resources
        for number in itertools.count(1):
            attempt = Attempt(self.app, self.session, self.store, step, self._inputs(step), line, share, work, number)
            try:
                return attempt.run(self.parent, lease)
            except Exception as error:
                if number > wanted.retries or not may_pass(error):
                    raise
                wait = min(RETRY_WAIT_LIMIT_S, wanted.retry_wait_s * 2 ** (number - 1))
                line.note(f"attempt {number} failed: {error}")
                line.note(f"attempt {number + 1} of {wanted.retries + 1} in {wait:g} s")
                share.rest(wait)
        raise AssertionError("unreachable")

    def _condemn_broken_inputs(self, step: Step, error: DamagedArtifact) -> None:
        """A hit is checked by size and by time or tag; who reads a copy hashes it. What is found broken there is set aside, so that
        the next run makes it again. Raises IntegrityError when an input was the reason."""
        for upstream in sorted(set(step.cfg.inputs.values())):
            made = self.steps[upstream].record
            assert made is not None
            if made.digest not in str(error):
                continue
            with self.condemning:  # another branch may read it too
                try:
                    self.store.verify(made.digest, deep=True)
                except IntegrityError as broken:
                    place = self.store.set_aside(made.fingerprint, made.fence)
                    raise IntegrityError(
                        f"{step.name} read the result of {upstream}: {broken}; set aside in {place}: run again, it will be made again"
                    ) from error

    def _moved(self, step: Step, record: Record) -> str | None:
        return plan.world_moved(step, record, self.store, self.resolver.registry, self.app.state_root)

    def _inputs(self, step: Step) -> dict[str, Artifact]:
        return {
            parameter: self.steps[upstream].stage.output(
                uri=self.store.object_uri(self.known[upstream]), digest=self.known[upstream]
            )
            for parameter, upstream in step.cfg.inputs.items()
        }


def may_pass(error: Exception) -> bool:
    """Whether another attempt may succeed: not when data, configuration or a gate said no, which they would say again."""
    if isinstance(error, MayPass | ResourcesUnavailable):
        return True
    return not isinstance(error, StageError | ArtifactError | ConfigError | IntegrityError | LeaseLost)
