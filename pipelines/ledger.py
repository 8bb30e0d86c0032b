"""The ledger of invocations, as `runs/<pipeline>/<id>.json` in the store: what each has needed and made, while it runs and after. Apart,
because it is written by whoever runs and read by whoever cleans up or asks what goes on, and neither knows the other.
"""

import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.config import AppConfig, redacted
from pipelines.lease import is_alive, same_host
from pipelines.plan import Step
from pipelines.registry import tracking_uri
from pipelines.store import Store

FORGOTTEN_AFTER_S = 14 * 86400.0
"""A run of another host that neither ended nor noted anything for so long is taken for dead: nobody here can see its process."""


class Entry:
    """This invocation in the ledger. Steps may be noted from several threads."""

    def __init__(
        self, store: Store, app: AppConfig, command: str, tags: Mapping[str, str], steps: Iterable[Step] = ()
    ) -> None:
        self._store, self._pipeline = store, app.name
        self._steps = _known(steps)
        self._lock = threading.Lock()
        facts = {
            "command": command,
            "started_at": time.strftime("%Y-%m-%d %H:%M:%S"),
            "tracking": home_of_records(app),
            "sweep": tags.get("raykeel.sweep"),
            "steps": self._steps,
        }
        self.id = store.begin_run(app.name, facts)

    def note(self, step: str, fingerprint: str | None, digest: str | None = None) -> None:
        """A step's identity is known, and its result when there is one: from here on nobody collects them."""
        known = {"fingerprint": fingerprint, "digest": digest}
        with self._lock:
            if self._steps.get(step) != known:
                self._steps[step] = known
                self._store.note_run(self._pipeline, self.id, {"steps": dict(self._steps)})

    def renew(self, steps: Iterable[Step]) -> None:
        """The plan was made anew."""
        with self._lock:
            self._steps = _known(steps)
            self._store.note_run(self._pipeline, self.id, {"steps": self._steps})

    def withdraw(self) -> None:
        """It never began: it is none of the last runs, whose results are kept."""
        self._store.bucket.delete([f"runs/{self._pipeline}/{self.id}.json"])

    def end(self, status: str, problem: str = "", run_id: str | None = None) -> None:
        """`run_id`: of the MLflow run."""
        facts = {"status": status, "problem": redacted(problem)[:500], "run_id": run_id}
        self._store.end_run(self._pipeline, self.id, {**facts, "ended_at": time.strftime("%Y-%m-%d %H:%M:%S")})


def _known(steps: Iterable[Step]) -> dict[str, dict[str, str | None]]:
    return {
        step.name: {"fingerprint": step.fingerprint, "digest": step.record.digest if step.record else None}
        for step in steps
        if step.fingerprint
    }


@dataclass(frozen=True)
class Invocation:
    """One entry as read: what it reaches, and whether it goes on."""

    id: str
    pipeline: str
    facts: Mapping[str, Any]
    steps: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)

    @property
    def goes_on(self) -> bool:
        """Not ended, and its process lives or cannot be seen from this host."""
        if self.facts.get("ended", True):
            return False
        owner = self.facts.get("owner") or {}
        if same_host(owner):
            return is_alive(owner)
        return time.time() - float(self.facts.get("modified", 0.0)) < FORGOTTEN_AFTER_S

    @property
    def status(self) -> str:
        """RUNNING, what it ended with, or KILLED when its process was gone before it could say."""
        if self.goes_on:
            return "RUNNING"
        return str(self.facts.get("status") or "KILLED")

    @property
    def owner(self) -> str:
        owner = self.facts.get("owner") or {}
        return f"process {owner.get('pid')} on {owner.get('host')}"

    @property
    def group(self) -> str:
        """Points of one sweep count as one run."""
        return str(self.facts.get("sweep") or self.id)


def read(store: Store) -> list[Invocation]:
    """All entries, oldest first."""
    modified = {entry.key: entry.modified for entry in store.bucket.entries("runs")}
    found = []
    for run in store.runs():
        at = modified.get(f"runs/{run['pipeline']}/{run['id']}.json", time.time())
        found.append(Invocation(run["id"], run["pipeline"], {**run, "modified": at}, run.get("steps") or {}))
    return found


def home_of_records(app: AppConfig) -> str:
    """Which tracking store an invocation records in: a server, or a file of one host."""
    uri = tracking_uri(app.tracking.uri, app.state_root)
    return redacted(uri) if uri.startswith("http") else f"{socket.gethostname()}:{uri.removeprefix('sqlite:///')}"


def is_out_of_sight(home: str | None, ours: str) -> bool:
    """Whether aliases may exist in a tracking store that we do not read: another server, or another existing file."""
    if not home or home == ours:
        return False
    host, _, path = home.partition(":")
    return home.startswith("http") or host != socket.gethostname() or Path(path).exists()
