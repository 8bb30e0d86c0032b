"""One execution of one stage: its own directory, its own MLflow run, published whole or not at all. Apart from the runner,
because this is where a stage's own trouble (bad data, a full disk, a signal) is turned into a truthful record.
"""

import errno
import json
import shutil
import subprocess
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.config import ROOT, AppConfig, plain
from pipelines.console import StageLine
from pipelines.journal import Run
from pipelines.lease import Lease
from pipelines.plan import Step
from pipelines.recorder import Recorder
from pipelines.session import PlanResolver, Session, Terminated
from pipelines.store import Record, Store, sha256_text
from stages.artifacts import Artifact
from stages.contract import Context, StageError


@dataclass
class Attempt:
    """What one execution works with; `run` is its life."""

    app: AppConfig
    session: Session
    store: Store
    step: Step
    inputs: dict[str, Artifact]
    line: StageLine

    def run(self, parent: Run, lease: Lease) -> Record:
        """Execute the step under its lease and publish what it made. Raises what the stage raised."""
        from pipelines.tracking import changed_params

        step, store = self.step, self.store
        assert step.fingerprint is not None
        tags = {"raykeel.stage": step.stage.name, "raykeel.fingerprint": step.fingerprint}
        child = self.session.tracking(self.app.name).start_child(parent, step.name, tags)
        # A forced execution must not continue what an earlier one of the same recipe left half done.
        work = store.work(step.fingerprint + (f"-{uuid.uuid4().hex[:8]}" if step.forced else ""))
        staged = store.staging_directory(step.fingerprint)
        status = "FAILED"
        try:
            child.log_params({**changed_params(step.cfg), "seed": str(self.app.seed)})
            child.log_text(json.dumps(step.payload, indent=1, sort_keys=True), "payload.json")
            child.log_text(json.dumps(plain(step.cfg), indent=1, sort_keys=True), "config.json")
            staged.mkdir(parents=True)
            work.mkdir(parents=True, exist_ok=True)
            record = self._make(child, lease, staged, work)
            status = "FINISHED"
            return record
        except (KeyboardInterrupt, Terminated):
            status = "KILLED"
            raise
        except Exception as error:
            child.set_tags({"raykeel.error": str(error)[:500]})
            if _disk_is_full(error):
                raise StageError(
                    f"{step.name}: no space left under {store.root} ({free_mb(store.root)} MB free): free some, or set "
                    f"store.root=<directory on another disk>, and run again"
                ) from error
            raise
        finally:
            shutil.rmtree(staged, ignore_errors=True)
            if step.forced:
                shutil.rmtree(work, ignore_errors=True)
            child.close(status)
            if child.failed:
                self.session.console.warn(f"MLflow: {child.failed}")

    def _make(self, child: Run, lease: Lease, staged: Path, work: Path) -> Record:
        from pipelines.tracking import MlflowRegistry

        step, store = self.step, self.store
        assert step.fingerprint is not None and step.payload is not None
        recorder = Recorder(child)
        context = Context(
            output=staged,
            work=work,
            state=self.app.state_root,
            fingerprint=step.fingerprint,
            seed=self.app.seed,
            tracker=recorder,
            registry=MlflowRegistry(self.session.tracking(self.app.name), child),
            progress=self.line.progress,
            headline=self.line.headline,
        )
        started, clock = time.time(), time.monotonic()
        made = step.stage.function(step.cfg, context, **self.inputs)
        assert type(made) is step.stage.output, f"{step.name} returned {type(made).__name__}"
        made.check()
        self._require_unchanged_sources()
        commit = git()
        meta = {
            "stage": step.name,
            "started_at": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started)),
            "seconds": round(time.monotonic() - clock, 3),
            "run_id": child.run_id,
            "headline": self.line.said,
            "metrics": recorder.last,
            "curves": recorder.curves(),
            "git": commit,
            **step.facts,
        }
        record = store.publish(staged, step.fingerprint, step.payload, meta, lease)
        child.set_tags({"raykeel.digest": record.digest, **{f"git.{k}": v for k, v in commit.items() if v}})
        for name in ("MANIFEST.json", "summary.json"):
            child.log_text((store.object(record.digest) / name).read_text("utf-8"), name.lower())
        return record

    def _require_unchanged_sources(self) -> None:
        """What was planned is what was read: a file edited, or an alias moved, meanwhile is not published as what it was."""
        step = self.step
        if step.stage.sources is None:
            return
        assert step.payload is not None
        now = dict(step.stage.sources(step.cfg, PlanResolver.of(self.app, self.store)))
        if now != step.payload["sources"]:
            raise StageError(f"{step.name}: its source changed while it was read; nothing was published, run again")


def git() -> dict[str, str]:
    """Commit, and a digest of what is not committed; empty outside a checkout."""

    def ask(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
        return run.stdout

    try:
        dirty = ask("status", "--porcelain") and ask("diff", "HEAD") + ask("ls-files", "--others", "--exclude-standard")
        return {"commit": ask("rev-parse", "HEAD").strip(), "dirty": sha256_text(dirty)[:16] if dirty else ""}
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return {}


def free_mb(path: Path) -> int:
    """Free space of the file system that holds `path`, in MiB."""
    return shutil.disk_usage(path).free // 2**20


def _disk_is_full(error: BaseException) -> bool:
    """Here, or in a Ray worker, whose exception carries its cause."""
    seen: list[Any] = [error, getattr(error, "cause", None), error.__cause__]
    return any(isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT) for e in seen)
