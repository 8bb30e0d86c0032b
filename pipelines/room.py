"""Room and rights, before anything starts: every place that a run writes to is tried and must have some space left. Apart from the runner,
because a full or read-only place is named with the key that moves it, in seconds, instead of by a trace from some library in an hour.
"""

import errno
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from pipelines import cluster
from pipelines.config import AppConfig, ClusterMode
from pipelines.mistakes import ConfigError
from pipelines.registry import tracking_uri
from pipelines.store import Store
from stages.contract import ResourcesUnavailable
from stages.storage import copies
from stages.storage.bucket import free_mb

FREE_DISK_MB = 200
"""Less than this in any place and nothing starts."""


def require(app: AppConfig, store: Store, *, ray: bool) -> None:
    """Raises ConfigError for a place that cannot be written and ResourcesUnavailable for one that is full, naming the key."""
    try:
        store.prepare()
    except OSError as error:
        raise ConfigError(
            f"store.root={store.root}: {store.scratch} cannot be written ({error.strerror}); choose another with store.root=<directory>"
        ) from error
    if odd := {"%", "#", "?"} & set(str(app.state_root)):
        raise ConfigError(
            f"state={app.state_root}: MLflow cannot keep its database below a name with {' '.join(sorted(odd))}; choose another"
        )
    for place, key in places(app, store):
        _require_writable(place, key)
    for place, key in places(app, store):
        if (free := free_mb(place)) < FREE_DISK_MB:
            raise ResourcesUnavailable(
                f"{place}: {free} MB free, at least {FREE_DISK_MB} MB are needed; free some (make gc), or set {key}=<on another disk>"
            )
    if ray and app.cluster.mode is not ClusterMode.attach:
        require_short_temporary()


def places(app: AppConfig, store: Store) -> Iterator[tuple[Path, str]]:
    """Directories that a run writes to, and what moves each."""
    yield store.scratch, "store.root"
    yield app.state_root, "state"
    if not tracking_uri(app.tracking.uri, app.state_root).startswith("http"):
        yield app.state_root / "mlflow", "state"
        yield app.state_root / "mlflow" / "artifacts", "state"
    if store.bucket.directory is None:
        yield copies.cache(), "RAYKEEL_CACHE"
    yield Path(tempfile.gettempdir()), "TMPDIR"


def is_full(error: BaseException) -> bool:
    """Whether a disk is: as the kernel says it, or SQLite, which keeps no error number."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "database or disk is full" in str(error)


def full(app: AppConfig, store: Store) -> str:
    """Which of the places is the full one: the one with the least space left."""
    disks: dict[int, tuple[int, Path, str]] = {}
    for place, key in places(app, store):
        if place.is_dir():
            disks.setdefault(place.stat().st_dev, (free_mb(place), place, key))
    free, place, key = min(disks.values())
    return f"no space left in {place} ({free} MB free): free some (make gc), or set {key}=<a place on another disk>, and run again"


def require_short_temporary() -> None:
    """Ray's sockets stand below the temporary directory, and the path of a socket is short."""
    place = tempfile.gettempdir()
    length = len(os.fsencode(place)) + len("/rk-12345678")
    if length > cluster.SOCKET_ROOM:
        raise ResourcesUnavailable(
            f"TMPDIR={place} is too long for Ray's sockets ({length} > {cluster.SOCKET_ROOM} bytes): set TMPDIR=/tmp"
        )


def _require_writable(place: Path, key: str) -> None:
    probe = place / f".probe-{uuid.uuid4().hex[:8]}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        kind = ResourcesUnavailable if error.errno == errno.ENOSPC else ConfigError
        raise kind(f"{place} cannot be written ({error.strerror}); choose another with {key}=<directory>") from error
