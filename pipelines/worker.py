"""The process that runs stages: `python -m pipelines.worker FD`. Apart from the driver, so that a stage can be stopped, killed and
timed out by the operating system: a process that dies takes its threads, its memory and its Ray tasks with it.

The driver sends jobs over one socket, this process sends back what the stage says, and at the end what it deposited. When the
driver is gone, by whatever means, the socket ends and this process ends itself and its children at once.
"""

import contextlib
import errno
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from pipelines import datasets, signs
from pipelines.config import AppConfig, ClusterMode
from pipelines.store import Deposit, IntegrityError, Store
from stages.artifacts import Artifact, ArtifactError, DamagedArtifact
from stages.contract import STAGES, Context, GateRefused, ResourcesUnavailable, StageConfig, StageError
from stages.storage.bucket import BucketError, local_path

if TYPE_CHECKING:  # its imports are for the process that starts Ray
    from pipelines.cluster import Address

REGISTRY_CALLS = ("find", "register", "alias", "set_alias", "resolve")
"""The only messages that wait for an answer."""

Emit = signs.Emit
"""`emit(kind, *arguments)`: progress, headline, metrics, dataset, text, described, and registry, whose answer it returns."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One attempt at one stage."""

    name: str
    """Name of the step in its pipeline."""
    cfg: StageConfig
    inputs: dict[str, Artifact]
    app: AppConfig
    """Without its stages: where store and state are."""
    fingerprint: str
    staged: Path
    work: Path
    ray: "Address | None"
    """The Ray to join, for a stage that needs one."""
    fence: int = 0
    """Of the lease under which it is made."""
    number: int = 1
    """Of the attempt under this lease."""

    @property
    def elsewhere(self) -> bool:
        """On a node of an attached cluster, whose directories are not ours. A state of the world (an endpoint) is made from here."""
        foreign = self.app.cluster.mode is ClusterMode.attach and local_path(self.app.store_root) is None
        return self.ray is not None and foreign and STAGES[type(self.cfg)].holds is None


class StageCrashed(Exception):
    """A stage failed with an error that only its own process knows; the text begins with the error's type."""


def execute(job: Job, emit: Emit) -> Deposit:
    """Run the stage in this process, validate what it made, put it into the store. No record names it yet."""
    emit("begun")
    with signs.arriving(emit, job.inputs.values()) as heard:
        made = STAGES[type(job.cfg)].function(job.cfg, context(job, heard), **job.inputs)
    validate(job, made)
    if datasets.is_dataset(type(made)):
        emit("described", datasets.profile(made.summary()), datasets.columns(made))
    emit("made")
    store = Store.open(job.app)
    with signs.moving(emit, 1.0, "storing"):
        deposit = store.deposit(job.staged)
    with contextlib.suppress(OSError):  # a memo only: the driver reads it and hashes nothing twice
        store.digests.save()
    return deposit


def context(job: Job, emit: Emit) -> Context:
    """What the stage may touch; whatever it says goes to `emit`."""
    return Context(
        output=job.staged,
        work=job.work,
        state=job.app.state_root,
        fingerprint=job.fingerprint,
        seed=job.app.seed,
        tracker=_Tracker(emit),
        registry=_Registry(emit),
        progress=lambda fraction, text: emit("progress", fraction, text),
        headline=lambda text: emit("headline", text),
    )


def validate(job: Job, made: Artifact) -> None:
    """Raise ArtifactError unless the directory holds what the stage's type promises."""
    assert type(made) is STAGES[type(job.cfg)].output, f"{job.name} returned {type(made).__name__}"
    made.check()


class _Tracker:
    """`stages.contract.Tracker` that passes everything on."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None, at: float | None = None) -> None:
        self._emit("metrics", {name: float(value) for name, value in metrics.items()}, step, at or time.time())

    def log_dataset(self, name: str, artifact: Artifact, context: str, profile: Mapping[str, float]) -> None:
        """Without a profile: the artifact's own."""
        facts = datasets.profile(profile or artifact.summary())
        self._emit("dataset", name, artifact, context, facts, datasets.columns(artifact))

    def log_text(self, text: str, path: str) -> None:
        self._emit("text", text, path)


class _Registry:
    """`stages.contract.Registry` whose calls the driver makes."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit

    def find(self, name: str, digest: str) -> int | None:
        found: int | None = self._emit("registry", "find", name, digest)
        return found

    def register(self, name: str, model: Artifact, tags: Mapping[str, str], metrics: Mapping[str, float]) -> int:
        return int(self._emit("registry", "register", name, model, dict(tags), dict(metrics)))

    def alias(self, name: str, alias: str) -> int | None:
        found: int | None = self._emit("registry", "alias", name, alias)
        return found

    def set_alias(self, name: str, alias: str, version: int) -> None:
        self._emit("registry", "set_alias", name, alias, version)

    def resolve(self, model: str) -> tuple[str, str]:
        uri, digest = self._emit("registry", "resolve", model)
        return uri, digest


class Worker:
    """This process's side of the socket. One thread reads, one writes, the main thread runs stages and takes interrupts."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._calling = threading.Lock()
        self._joined: Address | None = None
        self._busy = False
        self._writer = threading.Thread(target=self._write, name="to-driver", daemon=True)

    def live(self) -> None:
        """Run jobs until the driver says that there are no more, or a stage was interrupted."""
        signal.signal(signal.SIGINT, self._interrupted)
        threading.Thread(target=self._read, name="from-driver", daemon=True).start()
        self._writer.start()
        while (job := self._jobs.get()) is not None and self._attempt(job):
            pass
        self._outbox.put(None)
        self._writer.join()

    def emit(self, kind: str, *arguments: Any) -> Any:
        """Tell the driver. Never blocks, but for a call to the registry, which returns the driver's answer."""
        if kind != "registry":
            self._outbox.put((kind, *arguments))
            return None
        with self._calling:
            self._outbox.put((kind, *arguments))
            fine, answer = self._answers.get()
        if fine:
            return answer
        raise answer

    def _attempt(self, job: Any) -> bool:
        """Whether this process may run another one."""
        try:
            self._busy = True
            if isinstance(job, Exception):
                raise job
            if job.ray is not None:
                self._join(job.ray)
            deposit = self._run(job)
            self._busy = False
        except BaseException as error:
            self._busy = False
            logging.getLogger(__name__).error("%s failed", getattr(job, "name", "a job"), exc_info=error)
            self._outbox.put(("failed", portable(error), traceback.format_exc()))
            return False
        self._outbox.put(("done", deposit))
        return True

    def _run(self, job: Job) -> Deposit:
        if local_path(job.app.store_root) is not None:
            return execute(job, self.emit)
        from pipelines import host

        host.sweep()
        return host.execute_on_cluster(job, self.emit) if job.elsewhere else execute(job, self.emit)

    def _join(self, where: "Address") -> None:
        if self._joined is None:
            from pipelines import cluster

            self.emit("progress", 0.0, "joining Ray")
            cluster.join(where)
            self._joined = where

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._busy:
            self._busy = False  # one is enough: a second must not interrupt the clean-up of the first
            raise KeyboardInterrupt

    def _read(self) -> None:
        while True:
            try:
                kind, *rest = self._connection.recv()
            except (EOFError, OSError):
                _end()
            except Exception as error:  # a config or an artifact whose module cannot be imported here
                self._jobs.put(StageError(f"the stage cannot be loaded in a worker process: {portable(error)}"))
                continue
            if kind == "answer":
                self._answers.put((rest[0], rest[1]))
            elif kind == "waiting":
                threading.Thread(target=self._say_what_is_waited_for, daemon=True).start()
            else:
                self._jobs.put(rest[0] if kind == "job" else None)

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                _end()

    def _say_what_is_waited_for(self) -> None:
        text = "it says nothing"
        if self._joined is not None:
            from pipelines.demand import demand_against_supply

            try:
                text = demand_against_supply(self._joined.address)
            except Exception as error:  # the cluster itself may be what is gone
                text = f"Ray does not answer ({type(error).__name__})"
        self._outbox.put(("waiting", text))


def portable(error: BaseException) -> BaseException:
    """The error as the driver may know it: it loads no stage's and no library's module to read one."""
    if _disk_is_full(error):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for known in (
        GateRefused,
        ResourcesUnavailable,
        StageError,
        DamagedArtifact,
        ArtifactError,
        IntegrityError,
        BucketError,
    ):
        if isinstance(error, known):
            return known(str(error))
    if type(error).__module__ == "builtins":
        try:
            ForkingPickler.loads(ForkingPickler.dumps(error))
            return error
        except Exception:  # what it carries does not travel; its text does
            logging.getLogger(__name__).debug("not portable: %r", type(error))
    return StageCrashed(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}")


def _disk_is_full(error: BaseException) -> bool:
    """Here, or in a Ray worker, whose exception carries its cause."""
    seen: list[Any] = [error, getattr(error, "cause", None), error.__cause__]
    return any(isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT) for e in seen)


def _end() -> None:
    """The driver is gone: nobody waits for what we do. Our children go with us."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True
    )
    logging.captureWarnings(True)
    handle = int(sys.argv[1])
    os.set_inheritable(handle, False)  # a grandchild that held it would hide our death
    Worker(Connection(handle)).live()
    sys.stdout.flush()
    sys.stderr.flush()
    # Straight out: an orderly exit would wait for threads that a stage left, and Ray notices a death faster than a farewell.
    os._exit(0)


if __name__ == "__main__":
    # Jobs name this module's classes: they must be the ones of `pipelines.worker`, not of `__main__`.
    from pipelines import worker

    worker.main()
