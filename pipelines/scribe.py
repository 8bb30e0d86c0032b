"""The process that keeps MLflow open between runs, one for each state root and store: `python -m pipelines.scribe`, its desk on stdin.
Apart from the driver, because importing MLflow and opening its store takes longer than a short pipeline does.

Drivers send it lines of their journals over a Unix socket and wait for each answer, so what a run says is recorded when its command
returns. It knows nothing that is not in MLflow or in a journal on the disk: killed at any moment, it is started again by whoever needs
it, and goes on. When the last connection of a driver ends and its process is gone, what that left open is closed at once.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from pipelines import desk as desks
from pipelines.clerk import Clerk, Gone
from pipelines.config import redacted
from pipelines.desk import Desk
from pipelines.lease import identity, is_alive, same_host
from stages.contract import ResourcesUnavailable

if TYPE_CHECKING:
    from pipelines.tracking import Sender

IDLE_S = 600.0
"""Without a run. Who works on a pipeline starts the next run within minutes; after that 200 MB of memory are worth more than the 2 s
that it takes to start again. RAYKEEL_SCRIBE_IDLE_S overrides it."""
LOOK_S = 0.5
FINISH_S = 5.0
"""For what is being written when it is told to end. What is cut off is sent again by its driver or from its journal."""
BURY_S = 10.0
"""A killed process lives on for a moment after its sockets are closed."""
SOCKET_ROOM = 100
"""A Unix socket's path may have 107 bytes."""


class Scribe:
    """Answers drivers, each connection in a thread."""

    def __init__(self, desk: Desk, record: Path, nonce: str, idle_s: float) -> None:
        self.record = record
        self._desk, self._nonce = desk, nonce
        self._idle_s = idle_s
        self._home = _inode(Path(desk.state))
        self._clerk = Clerk(desk, self._await_burials)
        self._lock = threading.Lock()
        self._callers: dict[str, int] = {}
        """Owner of connections -> how many there are."""
        self._connections: set[socket.socket] = set()
        self._busy = 0
        self._idle_since = time.monotonic()
        self.stopping = threading.Event()
        self.is_gone = False

    def serve(self) -> None:
        """Until nobody needs it for long, it is told to stop, or what it writes to is not there any more."""
        directory = _short_directory()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(directory / "s"))
            listener.listen(64)
            listener.settimeout(LOOK_S)
            self._say_where(directory / "s")
            while not self._is_over():
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    connection.settimeout(None)
                    with self._lock:
                        self._connections.add(connection)
                    threading.Thread(target=self._attend, args=(connection,), daemon=True).start()
        finally:
            self._forget_where()
            listener.close()
            shutil.rmtree(directory, ignore_errors=True)
            self._hang_up()

    def _say_where(self, place: Path) -> None:
        facts = {"socket": str(place), "nonce": self._nonce, "desk": self._desk.digest, "uri": redacted(self._desk.uri)}
        fresh = self.record.with_suffix(f".{self._nonce}")
        fresh.write_text(json.dumps({**identity(), **facts}))
        fresh.chmod(0o600)
        fresh.replace(self.record)

    def _forget_where(self) -> None:
        if self._is_known():
            self.record.unlink(missing_ok=True)

    def _hang_up(self) -> None:
        """What is half written may be finished, unless it would be written to nowhere."""
        deadline = time.monotonic() + (0.0 if self.is_gone else FINISH_S)
        while self._busy and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _is_over(self) -> bool:
        self.is_gone = self.is_gone or _inode(Path(self._desk.state)) != self._home or self._clerk.is_ghost
        if self.is_gone or self.stopping.is_set():
            return True
        if not self._is_known():  # another one took its place, or somebody tidied up
            self._idle_s = 0.0
        with self._lock:
            if self._connections or self._busy:
                self._idle_since = time.monotonic()
                return False
            if time.monotonic() - self._idle_since < self._idle_s:
                return False
        try:
            with self._desk.alone(0.0):  # nobody is told of it any more; who was told a moment ago asks again
                self._forget_where()
        except ResourcesUnavailable:
            return False  # somebody is on the way here, perhaps
        except OSError:
            pass  # no place where anybody could be told
        return True

    def _is_known(self) -> bool:
        return (desks.read(self.record) or {}).get("nonce") == self._nonce

    def _attend(self, connection: socket.socket) -> None:
        """One conversation."""
        owner: dict[str, Any] | None = None
        senders: dict[str, Sender] = {}
        try:
            with connection, connection.makefile("rb") as lines:
                owner = self._arrived(desks.hear(lines)["owner"])
                desks.say(connection, {"scribe": os.getpid()})
                while True:
                    request = desks.hear(lines)
                    desks.say(connection, self._answered(request, senders))
        except (OSError, EOFError):
            pass  # the driver is gone: nothing that is not in its journal is lost
        except Gone:
            self.is_gone = True
        finally:
            with self._lock:
                self._connections.discard(connection)
            if owner is not None:
                self._left(owner)

    def _answered(self, request: dict[str, Any], senders: "dict[str, Sender]") -> dict[str, Any]:
        if request["op"] == "leave":  # another one takes over; this one ends when nobody uses it
            self._idle_s = 0.0
            return {}
        with self._working():
            return self._clerk.answer(request, senders)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Nothing that is begun here is cut off by idleness, or by being told to end, unless it takes long."""
        with self._lock:
            self._busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1

    # Who is there

    def _arrived(self, owner: dict[str, Any]) -> dict[str, Any]:
        key = json.dumps(owner, sort_keys=True)
        with self._lock:
            self._callers[key] = self._callers.get(key, 0) + 1
        return owner

    def _left(self, owner: dict[str, Any]) -> None:
        """The last connection of a process that is gone: nobody else will say how its runs ended."""
        key = json.dumps(owner, sort_keys=True)
        with self._lock:
            self._callers[key] -= 1
            if self._callers[key]:
                return
            del self._callers[key]
        deadline = time.monotonic() + BURY_S
        while is_alive(owner):
            with self._lock:
                had_nothing_to_say = key in self._callers
            if had_nothing_to_say or self.stopping.is_set() or time.monotonic() > deadline:
                return
            time.sleep(0.05)
        if same_host(owner):
            with self._working():
                self.settle()

    def settle(self) -> None:
        if not self.is_gone:
            self._clerk.settle()

    def _await_burials(self) -> None:
        """A line of a dead driver that is being written now must not be replayed beside it."""
        deadline = time.monotonic() + self._desk.timeout_s
        while time.monotonic() < deadline:
            with self._lock:
                owners = [json.loads(key) for key in self._callers]
            if all(is_alive(owner) or not same_host(owner) for owner in owners):
                return
            time.sleep(0.02)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _short_directory() -> Path:
    """A private directory (mode 0700) for the socket: the state's own path may be too long for one."""
    directory = Path(tempfile.mkdtemp(prefix=desks.SOCKET_PREFIX))
    if len(str(directory)) > SOCKET_ROOM:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix=desks.SOCKET_PREFIX, dir="/tmp"))
    return directory


@contextlib.contextmanager
def here(desk: Desk) -> Iterator[Scribe]:
    """A scribe in a thread of this process."""
    desk.records.mkdir(parents=True, exist_ok=True)
    scribe = Scribe(desk, desk.record, uuid.uuid4().hex, idle_s=float("inf"))
    thread = threading.Thread(target=scribe.serve, name="scribe", daemon=True)
    thread.start()
    while desks.read(desk.record) is None and thread.is_alive():
        time.sleep(0.005)
    try:
        yield scribe
    finally:
        scribe.stopping.set()
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bell:
            bell.connect((desks.read(scribe.record) or {}).get("socket", ""))  # it looks up at once
        thread.join()


def main() -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True
    )
    logging.captureWarnings(True)
    given = json.loads(sys.stdin.read())  # not in the arguments, which everybody can read: a URI may hold a password
    idle_s = float(os.environ.get("RAYKEEL_SCRIBE_IDLE_S", IDLE_S))
    scribe = Scribe(Desk(**given["desk"]), Path(given["record"]), given["nonce"], idle_s)

    def stop(number: int, frame: FrameType | None) -> None:
        scribe.stopping.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the run
    scribe.serve()
    sys.stderr.flush()
    os._exit(0)  # not through MLflow's farewells, nor waiting for a server


if __name__ == "__main__":
    main()
