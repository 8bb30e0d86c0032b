"""Real services for tests, each on loopback and thrown away: PostgreSQL, an S3-compatible server, an MLflow server, and a proxy
that misbehaves on request. Apart from the fixtures, because some tests stop and restart a server themselves.

Nothing here changes this process: a service gives its URI and the environment that a client needs.
"""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.config import ROOT

START_TIMEOUT_S = 120.0


@dataclass
class Service:
    """A process group that was started here and is ended here."""

    uri: str
    process: subprocess.Popen[bytes]
    env: dict[str, str] = field(default_factory=dict)

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ends the group; by force after 3 s (an MLflow server waits for its clients to hang up)."""
        self.send(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=3)
        self.send(signal.SIGKILL)
        self.process.wait(timeout=10)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def postgres() -> Iterator[Service]:
    """A cluster of Debian's PostgreSQL with one empty database `mlflow`, reachable through a socket in a directory of its own."""
    place = Path(tempfile.mkdtemp(prefix="raykeel-pg-"))
    user = _unprivileged()
    if user:
        shutil.chown(place, user)
    data, port = place / "data", free_port()
    initdb = [
        _binary("initdb"),
        "-D",
        str(data),
        "-U",
        "raykeel",
        "-A",
        "trust",
        "-E",
        "UTF8",
        "--locale=C",
        "--no-sync",
    ]
    subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, cwd=place, user=user)
    server = [_binary("postgres"), "-D", str(data), "-k", str(place), "-p", str(port)]
    for setting in ("listen_addresses=", "fsync=off", "shared_buffers=32MB", "max_connections=60"):
        server += ["-c", setting]
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(server, stdout=log, stderr=log, cwd=place, user=user, start_new_session=True)
    service = Service(f"postgresql+psycopg2://raykeel@/mlflow?host={place}&port={port}", process)
    try:
        _wait(process, lambda: _create_database(place, port), place / "log")
        yield service
    finally:
        service.stop(signal.SIGINT)  # "fast": sessions are cut, the cluster ends cleanly
        shutil.rmtree(place, ignore_errors=True)


def new_database(server: Service) -> str:
    """URI of one more empty database in a running cluster."""
    import psycopg2

    name = f"t{time.monotonic_ns()}"
    connection = psycopg2.connect(server.uri.replace("postgresql+psycopg2", "postgresql"))
    connection.autocommit = True
    connection.cursor().execute(f"CREATE DATABASE {name}")
    connection.close()
    return server.uri.replace("/mlflow?", f"/{name}?")


@contextlib.contextmanager
def s3() -> Iterator[Service]:
    """An S3-compatible server with the buckets `store` and `mlflow`; `env` is what boto3 and obstore read."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    env = {
        "AWS_ACCESS_KEY_ID": "raykeel",
        "AWS_SECRET_ACCESS_KEY": "not-a-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
    }
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "tests.s3_server", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
        service = Service(endpoint, process, env)
        try:
            _wait(process, lambda: _answers(endpoint), None)
            for bucket in ("store", "mlflow"):
                request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
                urllib.request.urlopen(request, timeout=10).close()
            yield service
        finally:
            service.stop()


def start_mlflow(database: str, artifacts: str, env: dict[str, str] | None = None, port: int | None = None) -> Service:
    """An MLflow server in front of a database, keeping artifacts at a URI; the caller stops it."""
    port = port or free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", database]
    command += ["--artifacts-destination", artifacts, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    log = tempfile.NamedTemporaryFile(prefix="raykeel-mlflow-", suffix=".log")  # noqa: SIM115 (lives with the process)
    process = subprocess.Popen(
        command, stdout=log, stderr=log, cwd=ROOT, start_new_session=True, env={**os.environ, **quiet, **(env or {})}
    )
    service = Service(f"http://127.0.0.1:{port}", process)
    try:
        _wait(process, lambda: _answers(f"{service.uri}/health"), Path(log.name))
    except BaseException:
        service.stop()
        raise
    return service


class Proxy:
    """A TCP proxy in front of a server of HTTP. `mode` holds for whatever a client sends from now on:
    pass; slow: waits `delay_s` first; 500: answers that itself; drop: closes; deaf: hands on, and closes instead of answering."""

    def __init__(self, target: str, delay_s: float = 5.0) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self.delay_s = delay_s
        self.mode = "pass"
        self.seen: dict[str, int] = {}
        """How many pieces of requests met each mode: the control that a fault happened."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.uri = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server: socket.socket | None = None
        with client, contextlib.suppress(OSError):
            while piece := client.recv(65536):
                mode = self.mode
                self.seen[mode] = self.seen.get(mode, 0) + 1
                if mode == "drop":
                    return
                if mode == "500":
                    client.sendall(b"HTTP/1.1 500 Trouble\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
                    return
                if mode == "slow":
                    time.sleep(self.delay_s)
                if server is None:
                    server = socket.create_connection(self._target, timeout=60)
                    threading.Thread(target=self._answer, args=(server, client), daemon=True).start()
                server.sendall(piece)
        if server is not None:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_WR)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with server, contextlib.suppress(OSError):
            while piece := server.recv(65536):
                if self.mode == "deaf":
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(piece)
            client.shutdown(socket.SHUT_RDWR)


def _binary(name: str) -> str:
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    found = str(places[0]) if places else shutil.which(name)
    assert found, f"{name} is not installed (Debian: apt install postgresql)"
    return found


def _unprivileged() -> str | None:
    """PostgreSQL refuses to run as root; somebody else's files are then owned by this user."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"


def _create_database(place: Path, port: int) -> bool:
    import psycopg2

    try:
        connection = psycopg2.connect(host=str(place), port=port, user="raykeel", dbname="postgres")
    except psycopg2.OperationalError:
        return False
    connection.autocommit = True
    connection.cursor().execute("CREATE DATABASE mlflow")
    connection.close()
    return True


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
        return True
    except OSError:
        return False


def _wait(process: subprocess.Popen[bytes], ready: Callable[[], bool], log: Path | None) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            said = log.read_text("utf-8", "replace")[-2000:] if log else ""
            raise RuntimeError(f"{process.args!r} did not start (exit {process.poll()})\n{said}")
        time.sleep(0.1)
