"""One execution of one stage: its own directory, its own MLflow run, published whole or not at all. Apart from the runner,
because this is where a stage's own trouble (bad data, a full disk, a signal) is turned into a truthful record.
"""

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines import fingerprint as fp
from pipelines import room
from pipelines.config import ROOT, AppConfig, plain
from pipelines.console import StageLine
from pipelines.datasets import OUTPUT
from pipelines.digests import sha256_text
from pipelines.journal import Run
from pipelines.lease import Lease
from pipelines.params import changed_params
from pipelines.plan import Step, artifact
from pipelines.pool import STOP_GRACE_S, TIMEOUT_GRACE_S, converse
from pipelines.recorder import Pruned, Recorder
from pipelines.schedule import Share, Stopped
from pipelines.session import PlanResolver, Session
from pipelines.store import Deposit, Record, Store
from pipelines.watch import Watch
from pipelines.worker import REGISTRY_CALLS, Job
from stages.artifacts import MANIFEST, Artifact
from stages.contract import StageError
from stages.storage.bucket import BucketError

PUBLISH_AGAIN_S = (1.0, 5.0, 15.0)


@dataclass
class Attempt:
    """What one execution works with; `run` is its life."""

    app: AppConfig
    session: Session
    store: Store
    step: Step
    inputs: dict[str, Artifact]
    line: StageLine
    share: Share
    work: Path
    """Resumable state; stays when the attempt fails."""
    number: int = 1
    """1 for the first, one more for each retry."""
    begun: float = 0.0
    """When the stage's function was called (monotonic seconds)."""
    about: tuple[Any, ...] = ()
    """Numbers and columns of the rows that it made."""

    def run(self, parent: Run, lease: Lease) -> Record:
        """Execute the step under its lease and publish what it made. Raises what the stage raised."""
        step, store = self.step, self.store
        assert step.fingerprint is not None
        die_if_asked(step.name, "before-start")
        tags = {"raykeel.stage": step.stage.name, "raykeel.fingerprint": step.fingerprint}
        tags["raykeel.attempt"] = str(self.number)
        child = self.session.tracking(self.app.name).start_child(parent, step.name, tags)
        staged = store.staging_directory(step.fingerprint)
        status = "FAILED"
        try:
            child.log_params({**changed_params(step.cfg), "seed": str(self.app.seed)})
            child.log_text(json.dumps(step.payload, indent=1, sort_keys=True), "payload.json")
            child.log_text(json.dumps(plain(step.cfg), indent=1, sort_keys=True), "config.json")
            staged.mkdir(parents=True)
            self.work.mkdir(parents=True, exist_ok=True)
            record = self._make(child, lease, staged)
            status = "FINISHED"
            return record
        except Stopped:
            status = "KILLED"
            raise
        except Pruned as error:
            status = "KILLED"
            child.set_tags({"raykeel.pruned": str(error)})
            raise
        except Exception as error:
            child.set_tags({"raykeel.error": str(error)[:500]})
            if room.is_full(error):
                raise StageError(f"{step.name}: {room.full(self.app, store)}") from error
            raise
        finally:
            shutil.rmtree(staged, ignore_errors=True)
            child.close(status)
            if child.failed:
                self.session.console.warn(f"MLflow: {child.failed}")
            die_if_asked(step.name, "after-close")

    def _make(self, child: Run, lease: Lease, staged: Path) -> Record:
        step = self.step
        recorder = Recorder(child, step.name, self.session.point)
        self._require_unchanged_code()
        started, self.begun = time.time(), time.monotonic()
        deposit = self._execute(child, recorder, lease, staged)
        self._require_unchanged_sources()
        commit = git()
        meta = {
            "stage": step.name,
            "started_at": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started)),
            "seconds": round(time.monotonic() - self.begun, 3),
            "run_id": child.run_id,
            "headline": self.line.said,
            "metrics": recorder.last,
            "curves": recorder.curves(),
            "git": commit,
            **step.facts,
        }
        die_if_asked(step.name, "before-commit")
        record = self._publish(deposit, meta, lease)
        die_if_asked(step.name, "after-commit")
        self._tell_mlflow(child, record, commit)
        return record

    def _publish(self, deposit: Deposit, meta: dict[str, Any], lease: Lease) -> Record:
        """The commit. A store that is away for a moment, or whose answer was lost, is asked again: it costs less than another attempt."""
        step = self.step
        assert step.fingerprint is not None and step.payload is not None
        for wait_s in PUBLISH_AGAIN_S:
            try:
                return self.store.publish(deposit, step.fingerprint, step.payload, meta, lease)
            except BucketError as error:
                if room.is_full(error):
                    raise
                self.line.note(f"not published yet, again in {wait_s:g} s: {error}")
                self.share.rest(wait_s)
        return self.store.publish(deposit, step.fingerprint, step.payload, meta, lease)

    def _tell_mlflow(self, child: Run, record: Record, commit: dict[str, str]) -> None:
        """The result is published: what goes wrong here makes nothing of it untrue, and another attempt would find it made."""
        try:
            if self.about:
                child.log_dataset(self.step.name, artifact(self.step, record, self.store), OUTPUT, *self.about)
            child.set_tags({"raykeel.digest": record.digest, **{f"git.{k}": v for k, v in commit.items() if v}})
            for name in (MANIFEST, "summary.json"):
                child.log_text((self.store.bucket.get(f"objects/{record.digest}/{name}") or b"").decode(), name.lower())
        except Exception as error:
            self.session.console.warn(f"{self.step.name} is published; its MLflow run does not show all of it: {error}")

    def _execute(self, child: Run, recorder: Recorder, lease: Lease, staged: Path) -> Deposit:
        """Have a worker process run the stage, and listen to it."""
        step, line = self.step, self.line
        assert step.fingerprint is not None
        where = None
        if step.needs_ray:
            line.progress(0.0, "waiting for Ray")
            where = self.session.ray()
        registry = self.session.tracking(self.app.name).registry(child)

        def answer(method: str, *arguments: Any) -> Any:
            assert method in REGISTRY_CALLS, method
            if method == "set_alias":
                die_if_asked(arguments[1], "before-alias")
            return getattr(registry, method)(*arguments)

        job = Job(
            name=step.name,
            cfg=step.cfg,
            inputs=self.inputs,
            app=dataclasses.replace(self.app, stages={}),
            fingerprint=step.fingerprint,
            staged=staged,
            work=self.work,
            ray=where,
            fence=lease.fence,
            number=self.number,
        )
        worker = self.session.pool.take(where.address if where else None)
        watch = Watch(step.name, step.cfg.resources.timeout_s, self.app.run, worker, lease, self.share, line.note)
        ears = {
            "progress": line.progress,
            "headline": line.headline,
            "metrics": recorder.log_metrics,
            "dataset": recorder.log_dataset,
            "text": recorder.log_text,
            "described": self._keep_in_mind,
            "registry": answer,
            "waiting": watch.told,
            "begun": self._begin_to_count,
            "made": lambda: line.progress(1.0, "storing"),
        }
        try:
            deposit: Deposit = converse(worker, job, lambda kind, *arguments: ears[kind](*arguments), watch)
        except BaseException as error:
            worker.stop(STOP_GRACE_S if isinstance(error, Stopped) else TIMEOUT_GRACE_S)
            raise
        finally:
            registry.close()
        self.session.pool.give_back(worker)
        return deposit

    def _keep_in_mind(self, *about: Any) -> None:
        """MLflow is told of a data set when it is published."""
        self.about = about

    def _begin_to_count(self) -> None:
        """A stage's seconds are its own: not those in which its worker started or Ray was waited for."""
        self.begun = time.monotonic()

    def _require_unchanged_code(self) -> None:
        """What is on disk is what the fingerprint says and what this run's processes load."""
        step = self.step
        assert step.payload is not None
        now, planned = fp.code_now(step.stage.function.__module__), step.payload["code"]
        if now != planned:
            files = sorted(name for name in now.keys() | planned.keys() if now.get(name) != planned.get(name))
            raise StageError(
                f"{step.name}: {', '.join(files)} changed since this run began; it was not started, run again"
            )

    def _require_unchanged_sources(self) -> None:
        """What was planned is what was read: a file edited, or an alias moved, meanwhile is not published as what it was."""
        step = self.step
        if step.stage.sources is None:
            return
        assert step.payload is not None
        now = dict(step.stage.sources(step.cfg, PlanResolver.of(self.app, self.store)))
        if now != step.payload["sources"]:
            raise StageError(f"{step.name}: its source changed while it was read; nothing was published, run again")


@functools.cache
def git() -> dict[str, str]:
    """Commit, and a digest of what is not committed; empty outside a checkout. Once a process: it says what code was loaded."""

    def ask(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
        return run.stdout

    try:
        dirty = ask("status", "--porcelain") and ask("diff", "HEAD") + ask("ls-files", "--others", "--exclude-standard")
        return {"commit": ask("rev-parse", "HEAD").strip(), "dirty": sha256_text(dirty)[:16] if dirty else ""}
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return {}


def die_if_asked(stage: str, point: str) -> None:
    """For fault tests only: RAYKEEL_KILL_AT=<stage>:<point> makes the driver kill itself there, as a lost machine would. Points:
    before-start, before-commit (deposited, not published), after-commit (published, MLflow not told), after-close; and
    <alias>:before-alias, with the version made and the alias not moved."""
    if os.environ.get("RAYKEEL_KILL_AT") == f"{stage}:{point}":
        os.kill(os.getpid(), signal.SIGKILL)
