"""What the driver and the scribe agree on: which scribe is the right one, where it is found, and how a line between them looks. Apart from
both, because neither loads the other: the scribe imports MLflow and the driver must not.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from pipelines.config import ROOT, AppConfig
from pipelines.lease import identity, is_alive, same_host
from pipelines.registry import tracking_uri
from stages.contract import ResourcesUnavailable
from stages.storage.bucket import local_path

CODE = ("pipelines/*.py", "stages/contract.py", "stages/artifacts.py", "stages/storage/*.py")
"""Files whose change makes another scribe."""
LIBRARIES = ("mlflow", "sqlalchemy", "boto3", "obstore")
SPEAKS_OF_ACCESS = ("MLFLOW_", "AWS_", "AZURE_", "GOOGLE_", "SSL_", "REQUESTS_", "CURL_", "PYTHON", "S3_")
"""Beginnings of variables by which MLflow and its clients of servers and object stores find their way and their rights."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "HOME", "TZ", "RAYKEEL_CACHE", "TMPDIR")
SET_BY_US = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_DISABLE_TELEMETRY",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES",
    "MLFLOW_HTTP_REQUEST_TIMEOUT",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION",
    "PYTHONPATH",
)
"""Names among them that say nothing: a process that loads MLflow, or a scribe, gives them their values."""
CREDENTIALS = ("~/.aws/credentials", "~/.aws/config", "~/.mlflow/credentials", "~/.netrc")
END_S = 8.0
"""For a scribe to finish what it is writing."""
ALONE_S = 90.0
"""Longer than a scribe may take to come up (`dictation.START_S`, then its greeting)."""
KILLED_S = 2.0
SOCKET_PREFIX = "rk-s-"
"""Of the private directory of a socket."""


@dataclass(frozen=True, kw_only=True)
class Desk:
    """What one scribe is for. A scribe of another desk, of other code, libraries or rights is not used."""

    state: str
    uri: str
    place: str | None
    """URI below which a new experiment keeps its files; None: the state directory."""
    timeout_s: float
    store: str
    """URI of the store of results."""
    scratch: str
    single_writer: bool

    @classmethod
    def of(cls, app: AppConfig) -> "Desk":
        return cls(
            state=str(app.state_root),
            uri=tracking_uri(app.tracking.uri, app.state_root),
            place=None if local_path(app.store_root) else f"{app.store_root}/mlflow",
            timeout_s=app.tracking.timeout_s,
            store=app.store_root,
            scratch=str(app.scratch_root),
            single_writer=app.store.single_writer,
        )

    @property
    def records(self) -> Path:
        return Path(self.state) / "scribes"

    @property
    def digest(self) -> str:
        return _digest(asdict(self))

    @property
    def record(self) -> Path:
        """Says where the scribe of this desk listens. By host: the state may be on a disk of several."""
        return self.records / f"{_digest([asdict(self), version(), rights(), os.getuid(), socket.gethostname()])}.json"

    @contextlib.contextmanager
    def alone(self, within_s: float | None = None) -> Iterator[None]:
        """Nobody else starts or ends a scribe of this state meanwhile. Raises ResourcesUnavailable when another one is at it for
        longer than `within_s` (default ALONE_S), OSError without the directory of records."""
        deadline = time.monotonic() + (ALONE_S if within_s is None else within_s)
        with (self.records / "lock").open("w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise ResourcesUnavailable(
                            f"another run has been starting the process that keeps MLflow open for too long (is it paused?): end it, "
                            f"it holds {self.records / 'lock'}"
                        ) from None
                time.sleep(0.01)
            yield


@functools.cache
def version() -> str:
    """The code and the libraries of a scribe that this process would start."""
    found = hashlib.sha256(sys.executable.encode())
    for pattern in CODE:
        for path in sorted(ROOT.glob(pattern)):
            found.update(path.name.encode() + path.read_bytes())
    for library in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.update(f"{library} {importlib.metadata.version(library)}".encode())
    return found.hexdigest()


def rights() -> str:
    """A digest of what lets this process in elsewhere: a scribe that was started with other rights must not write in its name."""
    names = [n for n in os.environ if (n.startswith(SPEAKS_OF_ACCESS) or n.upper() in PROXIES) and n not in SET_BY_US]
    found = [f"{name}={os.environ[name]}" for name in sorted(names)]
    named = [os.environ[name] for name in sorted(names) if os.environ[name].startswith(("/", "~")) and name.isupper()]
    for place in (*CREDENTIALS, *named):
        with contextlib.suppress(OSError, RuntimeError):  # the second: a user without a home
            status = Path(place).expanduser().stat()
            if not stat.S_ISREG(status.st_mode):
                continue
            found.append(f"{place} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def read(record: Path) -> dict[str, Any] | None:
    try:
        loaded: dict[str, Any] = json.loads(record.read_text())
        return loaded
    except (OSError, ValueError):
        return None


def running(state: Path) -> list[dict[str, Any]]:
    """The scribes of a state root that live on this host: pid, started, uri, ..."""
    found = [read(path) for path in sorted((state / "scribes").glob("*.json"))]
    return [one for one in found if one and is_alive(one)]


def end(state: Path) -> str | None:
    """End the scribes of a state root, which first finish what they are writing. Returns a sentence, or None when there was none."""
    scribes = running(state)
    for one in scribes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if one["pid"] != os.getpid():
                os.kill(int(one["pid"]), signal.SIGTERM)
    deadline = time.monotonic() + END_S
    while any(is_alive(one) and one["pid"] != os.getpid() for one in scribes):
        if time.monotonic() > deadline:
            for one in scribes:
                kill(one)
            break
        time.sleep(0.05)
    pids = ", ".join(str(one["pid"]) for one in scribes)
    return f"ended the process that keeps MLflow open ({pids})" if scribes else None


def kill(scribe: dict[str, Any]) -> None:
    """End one that does not answer. What it had not written is in the journals."""
    if is_alive(scribe) and scribe["pid"] != identity()["pid"]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(int(scribe["pid"]), signal.SIGKILL)
    deadline = time.monotonic() + KILLED_S
    while is_alive(scribe) and scribe["pid"] != identity()["pid"] and time.monotonic() < deadline:
        time.sleep(0.01)


def is_paused(scribe: dict[str, Any]) -> bool:
    """Whether somebody stopped it (SIGSTOP): nobody knows for how long."""
    try:
        return is_alive(scribe) and psutil.Process(int(scribe["pid"])).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def is_ours(place: Path) -> bool:
    """Whether a socket is one that only this user can have made: its directory admits nobody else. The one that a dead scribe left
    may be gone, with all of /tmp, and another user may have made one of its name."""
    try:
        return place.parent.stat().st_uid == os.getuid()
    except OSError:
        return False


def sweep(state: Path) -> None:
    """Take away what scribes left that were killed. The caller is alone."""
    for path in (state / "scribes").glob("*.json"):
        one = read(path)
        if one is None or not same_host(one) or is_alive(one):
            continue
        place = Path(str(one.get("socket")))
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            if is_ours(place) and place.parent.name.startswith(SOCKET_PREFIX):
                place.unlink(missing_ok=True)
                place.parent.rmdir()


def written(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def say(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(written(message))


def hear(lines: BinaryIO) -> dict[str, Any]:
    """The next message. Raises EOFError when there is none, or half of one."""
    line = lines.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the connection ended")
    message: dict[str, Any] = json.loads(line)
    return message
