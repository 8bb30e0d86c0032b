"""The story of one invocation: decide, then for each stage reuse or run, hand on, publish, record. Apart, because this is
the order in which promises are kept: lease, attempt, validation, publication, and only then what MLflow is told.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from pipelines import cluster, plan, report
from pipelines.config import ROOT, AppConfig, ClusterMode, ConfigError, plain
from pipelines.console import Console, StageLine
from pipelines.lease import Lease
from pipelines.plan import Step
from pipelines.registry import RegistryReader, tracking_uri
from pipelines.store import Record, Store
from stages.contract import Context, ResourcesUnavailable, StageError

FREE_DISK_MB = 200
CURVES = ("loss", "validation_loss")
CURVE_POINTS = 400


class Terminated(BaseException):
    """SIGTERM or SIGHUP: unwinds like Ctrl-C, exits with 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass
class Outcome:
    """What one run of a pipeline came to."""

    steps: list[Step]
    executed: int = 0
    run_id: str | None = None
    headlines: dict[str, str] = field(default_factory=dict)


class PlanResolver:
    """`stages.contract.Resolver` on the store's memo and the registry."""

    def __init__(self, store: Store, registry: RegistryReader) -> None:
        self._store = store
        self._registry = registry

    def path(self, path: Path) -> str:
        try:
            return self._store.path_digest(path)
        except OSError as error:
            raise StageError(f"{path}: cannot be read ({error.strerror})") from error

    def model(self, model: str) -> str:
        return self._registry.resolve(model)[1]


def planned(app: AppConfig) -> tuple[list[Step], Store]:
    """Steps with their actions decided. Light: no ray, no mlflow."""
    store = Store(app.store_root)
    registry = RegistryReader(tracking_uri(app.tracking.uri, app.state_root), app.tracking.timeout_s)
    steps = plan.build(app)
    plan.decide(app, steps, store, PlanResolver(store, registry), registry)
    store.save_memo()
    return steps, store


class Session:
    """Ray and MLflow, opened when the first stage needs them and closed once: several runs (a sweep) may share them."""

    def __init__(self, app: AppConfig, console: Console) -> None:
        self.app = app
        self.console = console
        self._stack = contextlib.ExitStack()
        self._ray = False
        self._tracking: Any = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def warm_up_ray(self) -> None:
        """Begin to start a local head in the background; `need_ray` waits for it."""
        if self.app.cluster.mode is ClusterMode.local and not self._ray:
            cluster.hold(self.app.state_root)
            self._stack.callback(cluster.release, self.app.state_root)
            threading.Thread(
                target=cluster.start_ahead, args=(self.app.cluster, self.app.state_root), daemon=True
            ).start()

    def need_ray(self) -> None:
        if not self._ray:
            self._stack.enter_context(cluster.connect(self.app.cluster, self.app.state_root))
            self._ray = True

    def tracking(self, experiment: str) -> Any:
        """The open tracking store. Raises ResourcesUnavailable."""
        from pipelines.tracking import Tracking

        if self._tracking is None:
            uri = tracking_uri(self.app.tracking.uri, self.app.state_root)
            self._tracking = Tracking(uri, self.app.state_root, experiment, self.app.tracking.timeout_s)
        return self._tracking


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
        recorder = _Recorder(child)
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


class _Recorder:
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


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C; a second signal ends the process at once."""
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(number)

    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
