"""One maker for each result: a lease with heartbeat and fence. Apart, because it is the only lock the runner takes.

Each try at a result takes the next slot `results/<fingerprint>/<fence>`, by one create-if-absent. A slot ends by a second one, of
`<fence>.json`: the holder's record, or a seal. Whoever takes over from a dead holder writes that seal first, so a stalled process that
wakes up late finds its slot closed and cannot publish; if its record was there first, the successor reuses it.
Where its process can be seen, a holder is dead when that is gone. Elsewhere (another host or container) it is dead when its beat has
not changed for STALE_AFTER_S of the watcher's own clock: no two clocks are ever compared.
"""

import functools
import hashlib
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from stages.storage.bucket import Bucket, BucketError

HEARTBEAT_S = 5.0
STALE_AFTER_S = 20.0
POLL_S = 1.0
INITIAL_PIDS = "4026531836"
"""The kernel's number of the pid namespace outside of all containers, the same in each boot."""
MACHINE_IDS = ("/etc/machine-id", "/var/lib/dbus/machine-id")
SLOT = re.compile(r"\d{6,}\.(lease\.json|json|beat)")
"""Names of a slot; what else a file system or a person leaves there is nobody's business."""


class LeaseLost(Exception):
    """Another run took this result over; ours may not be published."""


class LeaseTimeout(Exception):
    """Another run has been making this result for longer than we were told to wait."""


class Lease:
    """Held by at most one process: `with Lease.acquire(bucket, fingerprint, waiting) as lease: ...`."""

    def __init__(self, bucket: Bucket, fingerprint: str, fence: int) -> None:
        self.bucket = bucket
        self.fingerprint = fingerprint
        self.fence = fence
        self.lost = threading.Event()
        """Set when another run closed our slot: what we make cannot be published any more."""
        self._ended = False
        self._pulse = bucket.impatient(HEARTBEAT_S)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease-heartbeat", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(
        cls, bucket: Bucket, fingerprint: str, waiting: Callable[[str], None], timeout_s: float = 3600.0
    ) -> "Lease":
        """Wait until the result is ours to make. `waiting(text)` is called once a second with who holds it, and may raise."""
        deadline = time.monotonic() + timeout_s
        pulse = _Pulse()
        while True:
            slots = Slots.of(bucket, fingerprint)
            holder = slots.holder()
            if holder is not None and pulse.is_dead(holder, slots.beat()):
                # Sealed first, so that the dead holder's slot can never become a result after we began.
                bucket.create(_key(fingerprint, slots.newest), _seal(f"taken over from {_who(holder)}"))
                holder = None
            if holder is None:
                fence = slots.newest + 1
                mine = {**identity(), "nonce": uuid.uuid4().hex, "fence": fence}
                if bucket.create(_key(fingerprint, fence, "lease.json"), json.dumps(mine).encode()):
                    return cls(bucket, fingerprint, fence)
                continue  # somebody was faster
            if time.monotonic() > deadline:
                raise LeaseTimeout(
                    f"{_who(holder)} has been making {bucket.uri}/results/{fingerprint[:12]} for more than {timeout_s:.0f} s; "
                    "stop it or raise run.lease_timeout_s"
                )
            waiting(_who(holder))
            time.sleep(POLL_S)

    def commit(self, record: dict[str, Any]) -> dict[str, Any]:
        """Publish: the one moment in which a result begins to exist. Returns what stands there: our own earlier record when the
        answer to an earlier commit was lost. Raises LeaseLost when our slot was closed."""
        document = {**record, "nonce": uuid.uuid4().hex}
        data = json.dumps(document, sort_keys=True, allow_nan=False).encode()
        if not self.bucket.create(_key(self.fingerprint, self.fence), data):
            # Only we write records into this slot; others can only seal it.
            document = json.loads(self.bucket.get(_key(self.fingerprint, self.fence)) or b'{"sealed": ""}')
            if "sealed" in document:
                self.lost.set()
                raise LeaseLost(
                    f"another run took result {self.fingerprint[:12]} over while this one stood still; nothing was published"
                )
        self._ended = True
        return document

    def release(self) -> None:
        """Stop the heartbeat; without a result the slot is sealed, so that the next run need not wait for us to be dead."""
        self._stop.set()
        self._thread.join()
        try:
            if not self._ended:
                self.bucket.create(_key(self.fingerprint, self.fence), _seal("released without a result"))
            self.bucket.delete([_key(self.fingerprint, self.fence, "beat")])
        except BucketError as error:  # the next run takes over from a holder that beats no more
            logging.getLogger(__name__).warning("lease not released: %s", error)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _beat(self) -> None:
        beats = 0
        while not self._stop.wait(HEARTBEAT_S):
            beats += 1
            try:
                end = self._pulse.get(_key(self.fingerprint, self.fence))
                if end is not None:
                    if b'"sealed"' in end:  # and not our own record
                        self.lost.set()
                    return
                self._pulse.put(_key(self.fingerprint, self.fence, "beat"), str(beats).encode())
            except BucketError as error:  # a store that is away for a moment: beat again later
                logging.getLogger(__name__).warning("no heartbeat: %s", error)


class Slots:
    """The slots of one result as they are in the store now."""

    def __init__(self, bucket: Bucket, fingerprint: str, keys: list[str]) -> None:
        self._bucket, self._fingerprint = bucket, fingerprint
        self._names = {key.rpartition("/")[2] for key in keys if SLOT.fullmatch(key.rpartition("/")[2])}
        self.fences = sorted({int(name.partition(".")[0]) for name in self._names}, reverse=True)
        """Newest first."""

    @classmethod
    def of(cls, bucket: Bucket, fingerprint: str) -> "Slots":
        return cls(bucket, fingerprint, [entry.key for entry in bucket.entries(f"results/{fingerprint}")])

    @property
    def newest(self) -> int:
        """The highest fence; 0 when there is none."""
        return self.fences[0] if self.fences else 0

    def ended(self, fence: int) -> bool:
        return f"{fence:06d}.json" in self._names

    def holder(self) -> dict[str, Any] | None:
        """Who holds the newest slot; None when it is closed or there is none."""
        if not self.fences or self.ended(self.newest):
            return None
        found = self._bucket.get(_key(self._fingerprint, self.newest, "lease.json"))
        try:
            holder: dict[str, Any] = json.loads(found or b"")
            return holder
        except ValueError:
            return {"pid": 0, "host": "an unreadable lease", "started": ""}

    def beat(self) -> bytes | None:
        return self._bucket.get(_key(self._fingerprint, self.newest, "beat"))


class _Pulse:
    """Watches one holder: dead when its process is gone from this host, or when its beat stands still where we cannot see it."""

    def __init__(self) -> None:
        self._seen: Any = None
        self._since = time.monotonic()

    def is_dead(self, holder: dict[str, Any], beat: bytes | None) -> bool:
        if same_host(holder):
            return not is_alive(holder)  # a stopped process (Ctrl-Z, a sleeping laptop) still owns its work directory
        if self._seen != (holder, beat):
            self._seen, self._since = (holder, beat), time.monotonic()
        return time.monotonic() - self._since > STALE_AFTER_S


def identity() -> dict[str, Any]:
    """Who this process is: a pid alone may be used again, and says nothing on another machine or in another container."""
    return {"pid": os.getpid(), "started": _started(os.getpid()), **_place()}


def same_host(holder: dict[str, Any]) -> bool:
    """Whether the process of an `identity()` could be seen from here if it lived; else nobody here can say that it is dead.

    One host name is not enough: two containers of one name see other processes. A process of an earlier boot is gone for certain
    only outside of containers, where name and machine id belong to one machine: an image may give them to many."""
    here = _place()
    if any(holder.get(name) != here[name] for name in ("host", "machine", "pids")):
        return False
    return holder.get("boot") == here["boot"] or (here["machine"] != "" and here["pids"] == INITIAL_PIDS)


def is_alive(holder: dict[str, Any]) -> bool:
    """Whether the process of an `identity()` is seen to run. False where it cannot be seen: ask `same_host` before you bury it."""
    try:
        pid = int(holder["pid"])
        if not same_host(holder) or _started(pid) != holder["started"]:
            return False
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return False


def owner_tag() -> str:
    """This process in a file name. Holds no slash; may hold dots."""
    me = identity()
    start = str(me["started"]).partition(" ")[0]
    return "-".join(str(part) for part in (me["host"], me["machine"], me["boot"], me["pids"], me["pid"], start))


def tag_is_alive(tag: str) -> bool:
    """False only when the process of an `owner_tag()` is known to be gone: what cannot be seen from here, or read, may live."""
    parts = tag.rsplit("-", 5)
    if len(parts) != 6 or not parts[4].isdigit():
        return True
    host, machine, boot, pids, pid, start = parts
    started = f"{start} after boot {boot}" if boot else start
    holder = {"host": host, "machine": machine, "boot": boot, "pids": pids, "pid": int(pid), "started": started}
    return not same_host(holder) or is_alive(holder)


def _place() -> dict[str, str]:
    """Where this process can be seen: host name, a short digest of the machine's id, boot, and pid namespace."""
    machine, boot, pids = _kernel()
    return {"host": socket.gethostname(), "machine": machine, "boot": boot, "pids": pids}


@functools.cache
def _kernel() -> tuple[str, str, str]:
    """Empty where the system has no such thing. The machine's id itself is nobody's business elsewhere."""
    machine = next((found for path in MACHINE_IDS if (found := _word(path))), "")
    boot = _word("/proc/sys/kernel/random/boot_id")[:8]
    try:
        pids = str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        pids = ""
    return hashlib.sha256(f"raykeel {machine}".encode()).hexdigest()[:8] if machine else "", boot, pids


def _word(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process began, so that it can be told from a later one of the same pid; stays the same when the clock is set.
    psutil's create_time does not: it is counted from a boot time that moves with the clock."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.parent.parent.joinpath("self").exists():
        return f"{psutil.Process(pid).create_time():.1f}"
    ticks = stat.read_text().rpartition(")")[2].split()[19]
    return f"{ticks} after boot {_kernel()[1]}"


def _key(fingerprint: str, fence: int, kind: str = "json") -> str:
    return f"results/{fingerprint}/{fence:06d}.{kind}"


def _seal(why: str) -> bytes:
    return json.dumps({"sealed": why, "nonce": uuid.uuid4().hex}).encode()


def _who(holder: dict[str, Any]) -> str:
    namesake = holder.get("host") == socket.gethostname() and not same_host(holder)
    return f"process {holder.get('pid')} on {holder.get('host')}{' (another container or boot)' if namesake else ''}"
