"""One maker for each result: a lease with heartbeat and fence. Apart, because it is the only lock the runner takes.

The lease is a file created exclusively; its mtime is the heartbeat. A holder whose process is gone from this host is
replaced at once, one on another host after `STALE_AFTER_S` without a beat. Each holder gets a larger fence number; who publishes
with an old fence is refused, so that a stalled process that wakes up late cannot overwrite its successor's result.
"""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

HEARTBEAT_S = 5.0
STALE_AFTER_S = 30.0


class LeaseLost(Exception):
    """Another run took this result over; ours may not be published."""


class LeaseTimeout(Exception):
    """Another run has been making this result for longer than we were told to wait."""


class Lease:
    """Held by at most one process: `with Lease.acquire(root, fingerprint, waiting) as lease: ...`."""

    def __init__(self, path: Path, fence: int) -> None:
        self.path = path
        self.fence = fence
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease-heartbeat", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(
        cls, root: Path, fingerprint: str, waiting: Callable[[str], None], timeout_s: float = 3600.0
    ) -> "Lease":
        """Wait until the lease is ours. `waiting(text)` is called once a second with who holds it."""
        path = root / f"{fingerprint}.json"
        root.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + timeout_s
        while True:
            with _guard(path):
                holder = _read(path)
                if holder is None or _is_dead(path, holder):
                    fence = _next_fence(path)
                    _write(path, {**identity(), "fence": fence})
                    return cls(path, fence)
            who = f"process {holder['pid']} on {holder['host']}"
            if time.monotonic() > deadline:
                raise LeaseTimeout(
                    f"{who} has held {path} for more than {timeout_s:.0f} s; stop it or raise run.lease_timeout_s"
                )
            waiting(who)
            time.sleep(1.0)

    @contextlib.contextmanager
    def fenced(self) -> Iterator[None]:
        """Publish inside this block: nobody can take the lease over meanwhile. Raises LeaseLost when somebody has."""
        with _guard(self.path):
            holder = _read(self.path)
            if holder is None or holder.get("fence") != self.fence:
                raise LeaseLost(f"{self.path}: taken over by {holder}")
            yield

    def release(self) -> None:
        """Stop the heartbeat and give the lease back if it is still ours."""
        self._stop.set()
        self._thread.join()
        with _guard(self.path):
            holder = _read(self.path)
            if holder is not None and holder.get("fence") == self.fence:
                self.path.unlink()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            holder = _read(self.path)
            if holder is None or holder.get("fence") != self.fence:
                return  # taken over: the file is our successor's
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.path)


def identity() -> dict[str, Any]:
    """Who this process is: a pid alone may be used again."""
    return {"pid": os.getpid(), "started": psutil.Process().create_time(), "host": socket.gethostname()}


def is_alive(holder: dict[str, Any]) -> bool:
    """Whether the process of an `identity()` from this host still runs."""
    try:
        process = psutil.Process(int(holder["pid"]))
        return abs(process.create_time() - float(holder["started"])) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_dead(path: Path, holder: dict[str, Any]) -> bool:
    if holder.get("host") == socket.gethostname():
        return not is_alive(holder)  # a stopped process (Ctrl-Z, a sleeping laptop) still owns its work directory
    return time.time() - path.stat().st_mtime > STALE_AFTER_S


@contextlib.contextmanager
def _guard(path: Path) -> Iterator[None]:
    """A moment's exclusive access to the lease file; the kernel drops it when a process dies."""
    with path.with_suffix(".lock").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> dict[str, Any] | None:
    try:
        holder: dict[str, Any] = json.loads(path.read_text())
        return holder
    except (FileNotFoundError, ValueError):
        return None


def _write(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


def _next_fence(path: Path) -> int:
    counter = path.with_suffix(".fence")
    fence = int(counter.read_text()) + 1 if counter.exists() else 1
    temporary = path.with_suffix(".fence-new")
    temporary.write_text(str(fence))
    temporary.replace(counter)
    return fence
