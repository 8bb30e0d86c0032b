"""Runs a stage on a node of a cluster that shares no directory with this machine. Apart, because only an attached cluster with its store in
an object store works this way: the stage's directories are then its node's own, and what it says comes back as a stream.

The stage's function, its tasks and its workers see the node alone: inputs are the node's copies of artifacts
(`stages/storage/copies.py`), the output is deposited from there, resumable state is mirrored to the store (`pipelines/mirror.py`) so that
another attempt may go on elsewhere. The code of this checkout travels with the job (`cluster.join`).
"""

import contextlib
import dataclasses
import fcntl
import logging
import os
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines import signs
from pipelines.lease import owner_tag, tag_is_alive
from pipelines.mirror import Mirror
from pipelines.store import Deposit
from pipelines.worker import Emit, Job, execute, portable
from stages.contract import StageError, StageResources
from stages.storage.bucket import Bucket
from stages.storage.copies import cache
from stages.training.resources import TrainResources

MIRROR_EVERY_S = 10.0
UNSEEN_S = 86400.0
"""An attempt in a cache that nodes share, whose process cannot be seen from here, is dead when it gave no sign for so long."""


def execute_on_cluster(job: Job, emit: Emit) -> Deposit:
    """Have a node of the cluster run the stage; pass on what it says. Raises what the stage raised."""
    import ray

    task: Any = ray.remote(num_cpus=0, max_retries=0, max_calls=1, num_returns="streaming")(_serve)
    stream = task.options(scheduling_strategy=_place(job.cfg.resources)).remote(job)
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


def _place(resources: StageResources) -> Any:
    """A scheduling strategy: the node with most free GPUs for a stage that may train on them, for any other as Ray thinks best."""
    from ray._private.state import available_resources_per_node
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not isinstance(resources, TrainResources) or resources.gpus_per_worker == 0:
        return None
    free = {node: found.get("GPU", 0.0) for node, found in available_resources_per_node().items()}
    most = max(free, key=lambda node: free[node], default=None)
    return NodeAffinitySchedulingStrategy(most, soft=True) if most and free[most] >= 1 else None


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
    sweep()
    place = _attempts() / f"{owner_tag()}.{uuid.uuid4().hex[:8]}"
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
        bucket = Bucket(job.app.store_root, single_writer=job.app.store.single_writer)
        with _mirrored(Mirror(bucket, here.work, job.fence, job.number), place, emit):
            last: tuple[Any, ...] = ("deposit", execute(here, emit))
    except BaseException as error:
        logging.getLogger(__name__).error("%s failed", job.name, exc_info=error)
        last = ("failed", portable(error))
    shutil.rmtree(place, ignore_errors=True)  # before the last word: this process ends with it
    said.put(last)


@contextlib.contextmanager
def _mirrored(mirror: Mirror, place: Path, emit: Emit) -> Iterator[None]:
    """`work` begins as an earlier attempt's, and the store follows it every MIRROR_EVERY_S; after a failure, to its end. What was
    deposited needs no resumable state."""
    with signs.moving(emit, 0.0, "fetching what an earlier attempt left"):
        mirror.fetch()
    over = threading.Event()

    def follow() -> None:
        while not over.wait(MIRROR_EVERY_S):
            with contextlib.suppress(OSError):
                os.utime(place)  # a sign for other nodes that share the cache
            mirror.bring(over)

    follower = threading.Thread(target=follow, name="mirror", daemon=True)
    follower.start()
    try:
        yield
    except BaseException:
        over.set()
        with signs.moving(emit, 1.0, "storing what another attempt can go on from"):
            follower.join()
            mirror.bring()
        raise
    over.set()
    with signs.moving(emit, 1.0, "storing"):
        follower.join()


def sweep() -> None:
    """Remove what killed attempts left on this node: their directories, and copies that were cut."""
    for place in _attempts().glob("*"):
        with contextlib.suppress(OSError):
            unseen_s = time.time() - place.stat().st_mtime
            if unseen_s > UNSEEN_S or not tag_is_alive(place.name.rpartition(".")[0]):
                shutil.rmtree(place, ignore_errors=True)
    for partial in cache().glob(".*.*"):  # .<digest>.<random>
        with contextlib.suppress(OSError), (cache() / f"{partial.name.split('.')[1]}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who fetches it holds this
            shutil.rmtree(partial, ignore_errors=True)


def _attempts() -> Path:
    return cache().parent / "attempts"
