"""Runs a stage on a node of a cluster that shares no directory with this machine. Apart, because only an attached cluster with its store in
an object store works this way: the stage's directories are then its node's own, and what it says comes back as a stream.

The stage's function, its tasks and its workers see the node alone: inputs are the node's copies of artifacts
(`stages/storage/copies.py`), the output is deposited from there, resumable state is mirrored to `work/` of the store so that another
attempt may go on elsewhere. The code of this checkout travels with the job (`cluster.join`).
"""

import contextlib
import dataclasses
import logging
import queue
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.store import Deposit
from pipelines.worker import Emit, Job, execute, portable
from stages.contract import StageError
from stages.storage.bucket import Bucket, BucketError
from stages.storage.copies import cache

MIRROR_EVERY_S = 10.0
PASSING = (".writing-", ".partial", "windows/", "ray/")
"""Parts of names in `work/` that no later attempt needs."""


def execute_on_cluster(job: Job, emit: Emit) -> Deposit:
    """Have a node of the cluster run the stage; pass on what it says. Raises what the stage raised."""
    import ray

    task: Any = ray.remote(num_cpus=0, max_retries=0, max_calls=1, num_returns="streaming")(_serve)
    stream = task.remote(job)
    try:
        for reference in stream:
            kind, *arguments = ray.get(reference)
            if kind == "deposit":
                deposit: Deposit = arguments[0]
                return deposit
            if kind == "failed":
                raise arguments[0]
            emit(kind, *arguments)
    except ray.exceptions.RayError as error:
        said = (str(error).strip().splitlines() or [""])[-1]
        raise ConnectionError(f"{job.name}: its node or its task was lost ({type(error).__name__}: {said})") from error
    raise ConnectionError(f"{job.name}: its node ended without a result")


def _serve(job: Job) -> Iterator[tuple[Any, ...]]:
    """On the node: the stage in a thread, its messages as they come."""
    said: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(target=_run, args=(job, said), daemon=True).start()
    while True:
        message = said.get()
        yield message
        if message[0] in ("deposit", "failed"):
            return


def _run(job: Job, said: "queue.SimpleQueue[tuple[Any, ...]]") -> None:
    place = cache().parent / "attempts" / job.staged.name
    here = dataclasses.replace(
        job,
        app=dataclasses.replace(job.app, state=str(place)),
        staged=place / "output",
        work=place / "work" / job.work.name,
    )

    def emit(kind: str, *arguments: Any) -> None:
        if kind == "registry":
            raise StageError(f"{job.name}: a stage on a cluster's node has no registry")
        said.put((kind, *arguments))

    try:
        here.staged.mkdir(parents=True)
        with _mirrored(Bucket(job.app.store_root, single_writer=job.app.store.single_writer), here.work):
            last: tuple[Any, ...] = ("deposit", execute(here, emit))
    except BaseException as error:
        logging.getLogger(__name__).error("%s failed", job.name, exc_info=error)
        last = ("failed", portable(error))
    shutil.rmtree(place, ignore_errors=True)  # before the last word: this process ends with it
    said.put(last)


@contextlib.contextmanager
def _mirrored(bucket: Bucket, work: Path) -> Iterator[None]:
    """`work` begins as the store's copy, which follows it every MIRROR_EVERY_S and at the end."""
    prefix, known = f"work/{work.name}", {}
    work.mkdir(parents=True)
    for entry in bucket.entries(prefix):
        name = entry.key.removeprefix(f"{prefix}/")
        bucket.download(entry.key, work / name)
        known[name] = _stamp(work / name)
    done = threading.Event()

    def follow() -> None:
        while not done.wait(MIRROR_EVERY_S):
            _mirror(bucket, work, prefix, known)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        done.set()
        follower.join()
        _mirror(bucket, work, prefix, known)


def _mirror(bucket: Bucket, work: Path, prefix: str, known: dict[str, tuple[int, int]]) -> None:
    """Upload what changed, remove what is gone. A file that moves meanwhile is caught the next time: readers of `work/` trust
    nothing that is not complete by its own marker."""
    found: dict[str, tuple[int, int]] = {}
    for path in work.rglob("*"):
        name = path.relative_to(work).as_posix()
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and not any(part in name for part in PASSING):
                found[name] = _stamp(path)
    try:
        # Markers last: what they vouch for is there before them.
        for name in sorted(found, key=lambda n: (n.endswith(".json"), n)):
            if known.get(name) != found[name]:
                bucket.upload(work, [name], prefix)
                known[name] = found[name]
        gone = known.keys() - found.keys()
        bucket.delete(f"{prefix}/{name}" for name in gone)
        for name in gone:
            del known[name]
    except (BucketError, FileNotFoundError) as error:
        logging.getLogger(__name__).warning("work not mirrored yet: %s", error)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
