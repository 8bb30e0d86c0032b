"""A project that faults strike: its state root, its store, its command line, and what is left in them. Apart from the tests, because
all of them ask the same questions afterwards.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlflow
import psutil

from pipelines.config import ROOT
from pipelines.lease import Slots
from pipelines.store import Store
from stages.artifacts import MANIFEST


@dataclass
class Project:
    """Everything runs in processes of its own, as `make run` would start them."""

    state: Path
    conf: Path
    root: str | None = None
    """URI of the store, when it is not the directory below the state root."""
    env: dict[str, str] = field(default_factory=dict)
    pipeline: str = "faults"

    def command(self, *overrides: str, verb: str = "run") -> list[str]:
        words = [
            f"state={self.state}",
            f"pipeline={self.pipeline}",
            *([f"store.root={self.root}"] if self.root else []),
        ]
        return [sys.executable, "-m", "tests.faults.command", verb, "--conf", str(self.conf), *words, *overrides]

    def environment(self, faults: dict[str, Any] | None, env: dict[str, str] | None = None) -> dict[str, str]:
        found = {**os.environ, "PYTHONPATH": str(ROOT), **self.env, **(env or {})}
        return found | ({"RAYKEEL_FAULTS": json.dumps(faults)} if faults else {})

    def start(
        self,
        *overrides: str,
        faults: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        command: list[str] | None = None,
    ) -> "subprocess.Popen[str]":
        """In a process group of its own, as a shell would."""
        return subprocess.Popen(
            command or self.command(*overrides),
            cwd=ROOT,
            env=self.environment(faults, env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )

    def run(
        self,
        *overrides: str,
        faults: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        expect: int | None = 0,
        verb: str = "run",
    ) -> str:
        """Run to the end; returns what it said."""
        process = self.start(*overrides, faults=faults, env=env, command=self.command(*overrides, verb=verb))
        said, _ = process.communicate(timeout=120)
        assert expect is None or process.returncode == expect, f"exit {process.returncode}\n{said}"
        return said

    # What is left

    @property
    def store(self) -> Store:
        directory = self.state / "store"
        return Store(self.root or directory.as_uri(), self.state / "scratch" if self.root else directory)

    @property
    def executions(self) -> list[str]:
        log = self.state / "executions.log"
        return log.read_text().split() if log.exists() else []

    def events(self, *names: str) -> list[tuple[str, int, float]]:
        """("expand begin", process, seconds) of the named events, in order."""
        log = self.state / "events.log"
        lines = [line.rsplit(" ", 2) for line in log.read_text().splitlines()] if log.exists() else []
        return [(event, int(pid), float(at)) for event, pid, at in lines if not names or event in names]

    def await_event(self, event: str, process: "subprocess.Popen[str]", count: int = 1) -> int:
        """Pid of the process in which the event came."""
        deadline = time.monotonic() + 60
        while len(found := self.events(event)) < count:
            if process.poll() is not None:
                raise AssertionError(f"ended with {process.returncode} before {event}\n{process.communicate()[0]}")
            assert time.monotonic() < deadline, f"no {event}"
            time.sleep(0.02)
        return found[count - 1][1]

    @property
    def published(self) -> dict[str, str]:
        """Stage -> content digest of its result."""
        return {record.payload["stage"]: record.digest for record in self.store.records()}

    @property
    def client(self) -> mlflow.MlflowClient:
        return mlflow.MlflowClient(f"sqlite:///{self.state / 'mlflow' / 'mlflow.db'}")

    def runs(self) -> list[tuple[str, str, Any]]:
        """(name of the stage or of the pipeline, status, run) of every MLflow run."""
        client = self.client
        found = client.search_runs([e.experiment_id for e in client.search_experiments()])
        return [(run.data.tags["mlflow.runName"].split()[0], run.info.status, run) for run in found]

    def statuses(self, name: str) -> list[str]:
        return sorted(status for found, status, _ in self.runs() if found == name)

    def versions(self) -> list[tuple[int, str]]:
        """(number, digest) of every version of the registered model."""
        found = self.client.search_model_versions("name='faults'")
        return sorted((int(version.version), version.tags["digest"]) for version in found)

    def require_sound(self) -> None:
        """What no fault may break: each record's object is whole, each manifest's bytes are what it says, no lease is left by
        the living, nothing is half published."""
        store = self.store
        for record in store.records():
            store.verify(record.digest, deep=True)
        for digest in store.bucket.children("objects"):
            if store.bucket.get(f"objects/{digest}/{MANIFEST}") is not None:
                store.verify(digest, deep=True)

    def require_tidy(self) -> None:
        """After a run that ended in order: no staging, no open slot."""
        store = self.store
        assert list((store.scratch / "staging").glob("*")) == []
        held = [f for f in store.bucket.children("results") if Slots.of(store.bucket, f).holder() is not None]
        assert held == []


def gone(pid: int, within_s: float) -> bool:
    """Whether the process ends in time (a zombie has ended)."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
