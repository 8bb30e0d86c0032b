"""The story of one invocation: decide, then for each stage reuse or run, hand on, publish, record. Apart, because this is
the order in which promises are kept: lease, attempt, validation, publication, and only then what MLflow is told.
"""

import json
import shutil
import subprocess
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines import plan, report
from pipelines.config import ROOT, AppConfig, plain
from pipelines.console import StageLine
from pipelines.lease import Lease
from pipelines.mistakes import ConfigError
from pipelines.plan import Step
from pipelines.recorder import Recorder
from pipelines.registry import RegistryReader, tracking_uri
from pipelines.session import PlanResolver, Session, Terminated, planned
from pipelines.store import Record, Store
from stages.contract import Context, ResourcesUnavailable, StageError

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
    tracking = session.tracking(app.tracking.experiment or app.name)
    parent = tracking.start_parent(
        f"{app.name} {time.strftime('%Y-%m-%d %H:%M:%S')}", {"raykeel.kind": "pipeline", **(tags or {})}
    )
    outcome.run_id = parent.run_id
    parent.log_params({"pipeline": app.name, "seed": str(app.seed), "command": command})
    status, problem = "FAILED", "an unexpected error"
    try:
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
        store.save_memo()
    return outcome


@dataclass
class _Execution:
    """One pass over the steps of one run."""

    app: AppConfig
    session: Session
    store: Store
    steps: list[Step]
    outcome: Outcome
    parent: Any

    def all(self) -> None:
        known: dict[str, str] = {}
        reader = RegistryReader(tracking_uri(self.app.tracking.uri, self.app.state_root))
        resolver = PlanResolver(self.store, reader)
        width = max(len(step.name) for step in self.steps)
        for step in self.steps:
            if step.action == "unknown":
                self._decide_late(step, known, resolver, reader)
            if step.action == "reuse":
                assert step.record is not None
                source = step.record.meta.get("run_id") or "unrecorded"
                self.parent.set_tags({f"reused.{step.name}": source})
                self.session.console.line(
                    f"= {step.name.ljust(width)}   reused  {step.record.meta.get('headline', '')}"
                )
            else:
                self._execute(step, known, width)
                self.outcome.executed += 1
            assert step.record is not None
            self.outcome.headlines[step.name] = step.record.meta.get("headline", "")
            known[step.name] = step.record.digest
            self.store.remember(self.app.name, step.name, step.record)

    def _decide_late(self, step: Step, known: dict[str, str], resolver: PlanResolver, reader: RegistryReader) -> None:
        """Decide a step that had to wait for its inputs."""
        plan.identify(self.app, step, known, resolver)
        assert step.fingerprint is not None
        forced = plan.forced(self.app, self.steps)
        record, broken = self.store.find(step.fingerprint)
        if record and step.name not in forced:
            moved = plan.world_moved(step, record, self.store, reader, self.app.state_root)
            if moved is None:
                step.action, step.record = "reuse", record
                return
            broken = moved
        step.action, step.reason = "run", forced.get(step.name) or broken or plan.why(step)

    def _execute(self, step: Step, known: dict[str, str], width: int) -> None:
        console, store = self.session.console, self.store
        assert step.fingerprint is not None and step.payload is not None
        with console.stage(step.name, width) as line:
            if step.stage.ray:
                line.progress(0.0, "waiting for Ray")
                self.session.need_ray()
            with Lease.acquire(
                store.root / "leases",
                step.fingerprint,
                lambda who: line.progress(0.0, f"{who} is making this; waiting"),
                self.app.run.lease_timeout_s,
            ) as lease:
                record, broken = store.find(step.fingerprint)
                if broken:
                    place = store.set_aside(step.fingerprint)
                    console.warn(f"{broken}; set aside in {place} and made again")
                elif record and "run.rerun" not in step.reason and self._holds(step, record):
                    step.action, step.record = "reuse", record
                    line.headline(f"made by another run meanwhile; {record.meta.get('headline', '')}")
                    return
                step.record = self._attempt(step, known, lease, line)

    def _holds(self, step: Step, record: Record) -> bool:
        registry = RegistryReader(tracking_uri(self.app.tracking.uri, self.app.state_root))
        return plan.world_moved(step, record, self.store, registry, self.app.state_root) is None

    def _attempt(self, step: Step, known: dict[str, str], lease: Lease, line: StageLine) -> Record:
        """One execution: its own directory, its own MLflow run; published or nothing."""
        from pipelines.tracking import MlflowRegistry, changed_params

        assert step.fingerprint is not None and step.payload is not None
        tracking = self.session.tracking(self.app.name)
        child = tracking.start_child(
            self.parent, step.name, {"raykeel.stage": step.stage.name, "raykeel.fingerprint": step.fingerprint}
        )
        child.log_params({**changed_params(step.cfg), "seed": str(self.app.seed)})
        child.log_text(json.dumps(step.payload, indent=1, sort_keys=True), "payload.json")
        child.log_text(json.dumps(plain(step.cfg), indent=1, sort_keys=True), "config.json")
        recorder = Recorder(child)
        # A forced run must not continue what an earlier run of the same recipe left half done.
        work = step.fingerprint if "run.rerun" not in step.reason else f"{step.fingerprint[:48]}{uuid.uuid4().hex[:16]}"
        staged = self.store.stage_directory(step.fingerprint)
        self.store.work(work).mkdir(parents=True, exist_ok=True)
        started, clock = time.time(), time.monotonic()
        status = "FAILED"
        try:
            context = Context(
                output=staged,
                work=self.store.work(work),
                state=self.app.state_root,
                fingerprint=work,
                seed=self.app.seed,
                tracker=recorder,
                registry=MlflowRegistry(tracking, child),
                progress=line.progress,
                headline=line.headline,
            )
            made = step.stage.function(step.cfg, context, **self._inputs(step, known))
            assert type(made) is step.stage.output, f"{step.name} returned {type(made).__name__}"
            made.check()
            meta = {
                "stage": step.name,
                "started_at": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started)),
                "seconds": round(time.monotonic() - clock, 3),
                "run_id": child.run_id,
                "headline": line.said,
                "metrics": recorder.last,
                "curves": recorder.curves(),
                "git": _git(),
            }
            record = self.store.publish(staged, step.fingerprint, step.payload, meta, lease)
            if work != step.fingerprint:
                shutil.rmtree(self.store.work(work), ignore_errors=True)
            status = "FINISHED"
            child.set_tags({"raykeel.digest": record.digest})
            child.log_text((self.store.object(record.digest) / "MANIFEST.json").read_text("utf-8"), "manifest.json")
            child.log_text((self.store.object(record.digest) / "summary.json").read_text("utf-8"), "summary.json")
            return record
        except (KeyboardInterrupt, Terminated):
            status = "KILLED"
            raise
        except Exception as error:
            child.set_tags({"raykeel.error": str(error)[:500]})
            if isinstance(error, OSError) and error.errno == 28:
                raise StageError(
                    f"{step.name}: no space left on {self.store.root} ({_free_mb(self.store.root)} MB free); free some and run again"
                ) from error
            raise
        finally:
            shutil.rmtree(staged, ignore_errors=True)
            child.close(status)
            if child.failed:
                self.session.console.warn(f"MLflow: {child.failed}")

    def _inputs(self, step: Step, known: dict[str, str]) -> dict[str, Any]:
        by_name = {s.name: s for s in self.steps}
        inputs = {}
        for parameter, upstream in step.cfg.inputs.items():
            kind = by_name[upstream].stage.output
            inputs[parameter] = kind(uri=self.store.object(known[upstream]).as_uri(), digest=known[upstream])
        return inputs


def _require_room(store: Store) -> None:
    try:
        store.prepare()
    except OSError as error:
        raise ConfigError(
            f"store.root={store.root}: cannot be written ({error.strerror}); choose another with store.root=<directory>"
        ) from error
    free = _free_mb(store.root)
    if free < FREE_DISK_MB:
        raise ResourcesUnavailable(
            f"{store.root}: {free} MB free, at least {FREE_DISK_MB} MB are needed; free some or set store.root=<directory>"
        )


def _free_mb(path: Path) -> int:
    return shutil.disk_usage(path).free // 2**20


def _git() -> dict[str, str]:
    """Commit and digest of uncommitted changes; empty outside a checkout."""

    def ask(*arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, timeout=10, check=True).stdout

    try:
        import hashlib

        dirty = ask("diff", "HEAD")
        return {
            "commit": ask("rev-parse", "HEAD").decode().strip(),
            "dirty": hashlib.sha256(dirty).hexdigest() if dirty else "",
        }
    except (OSError, subprocess.SubprocessError):
        return {}
