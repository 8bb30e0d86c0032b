"""Ray for this project: the only place that calls `ray.init`. Apart, because who starts a cluster must also know how to end it.

A local head is one keeper process (`python -m pipelines.cluster`) that holds a private Ray: own address, own short temp
directory, token authentication, no dashboard, no client server. Its death takes all of it down, so one recorded pid is enough
to stop it. It lives while a run uses it or an endpoint is recorded, and ends by itself otherwise, also after a SIGKILL of the run.
`ray start` is not used: it opens fixed ports (10001, 52365), on which two clones of this project would meet.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from pipelines.config import ROOT, ClusterConfig, ClusterMode
from pipelines.lease import identity, is_alive
from stages.contract import ResourcesUnavailable

START_TIMEOUT_S = 90.0
IDLE_EXIT_S = 3.0


@contextlib.contextmanager
def connect(cfg: ClusterConfig, state: Path) -> Iterator[None]:
    """Ray is initialised in this process inside the block. Raises ResourcesUnavailable."""
    quiet()
    if cfg.mode is ClusterMode.local:
        hold(state)
        try:
            address = _head_address(cfg, state)
            _go_private(state)
            _init(address=address)
            yield
        finally:
            _shutdown()
            release(state)
    elif cfg.mode is ClusterMode.ephemeral:
        state.mkdir(parents=True, exist_ok=True)
        _go_private(state)
        try:
            _start_here(cfg, state)
            yield
        finally:
            _shutdown()
            shutil.rmtree(temp_directory(state), ignore_errors=True)
    else:
        assert cfg.address is not None
        _require_listening(cfg.address, cfg.connect_timeout_s)
        try:
            _init(address=cfg.address)
            yield
        finally:
            _shutdown()


def hold(state: Path) -> None:
    """Say that this process uses the local head: it stays up until `release`, or until this process is gone."""
    user = _user_path(state)
    user.parent.mkdir(parents=True, exist_ok=True)
    user.write_text(json.dumps(identity()))


def release(state: Path) -> None:
    """The head is not needed any more by this process; without other users and without an endpoint it is stopped."""
    _user_path(state).unlink(missing_ok=True)
    if not _users(state) and not endpoint_record(state):
        down(state)


def start_ahead(cfg: ClusterConfig, state: Path) -> None:
    """Start the local head if there is none, so that it is up when the first stage needs it; `connect` reports failures."""
    quiet()
    with contextlib.suppress(ResourcesUnavailable, OSError):
        _head_address(cfg, state)


def quiet() -> None:
    """No telemetry, no progress bars of the library's own; set before ray is imported, inherited by its workers."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def down(state: Path) -> str | None:
    """Stop this project's head, and with it what it serves. Returns a sentence, or None when nothing ran."""
    endpoint_path(state).unlink(missing_ok=True)
    head = _head(state)
    if head is None:
        return None
    try:
        process = psutil.Process(head["pid"])
        family = [process, *process.children(recursive=True)]
        process.terminate()
        process.wait(timeout=20)
    except psutil.TimeoutExpired:
        process.kill()
    except psutil.NoSuchProcess:
        family = []
    # The raylet ends its workers itself; whoever is left after that is ended here, by identity and never by name.
    _, left = psutil.wait_procs(family, timeout=5)
    for straggler in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            straggler.kill()
    _head_path(state).unlink(missing_ok=True)
    shutil.rmtree(temp_directory(state), ignore_errors=True)
    return f"stopped the Ray head (process {head['pid']}) and what it served"


def status(state: Path) -> dict[str, Any]:
    """What runs now: {"head": pid or None, "endpoint": record or None}."""
    head = _head(state)
    return {"head": head["pid"] if head else None, "endpoint": endpoint_record(state)}


def endpoint_path(state: Path) -> Path:
    return state / "endpoint.json"


def endpoint_record(state: Path) -> dict[str, Any] | None:
    """What `deploy` recorded of the live endpoint, or None."""
    try:
        record: dict[str, Any] = json.loads(endpoint_path(state).read_text())
        return record
    except (OSError, ValueError):
        return None


def logs(state: Path) -> Path:
    """Where the head and Ray's own processes write their logs."""
    head = _head(state)
    return Path(head["session"]) / "logs" if head else state / "logs"


def temp_directory(state: Path) -> Path:
    """Short, because a Unix socket's path may have 107 bytes and Ray appends about 60 of them; one for each state root."""
    return Path(tempfile.gettempdir()) / f"rk-{os.getuid()}-{hashlib.sha256(str(state).encode()).hexdigest()[:8]}"


def _user_path(state: Path) -> Path:
    return state / "cluster" / "users" / f"{os.getpid()}.json"


def _head_path(state: Path) -> Path:
    return state / "cluster" / "head.json"


def _head(state: Path) -> dict[str, Any] | None:
    """The recorded head if its process lives."""
    try:
        head: dict[str, Any] = json.loads(_head_path(state).read_text())
    except (OSError, ValueError):
        return None
    return head if is_alive(head) else None


def _users(state: Path) -> list[int]:
    """Pids of live runs on the head."""
    alive = []
    for path in (state / "cluster" / "users").glob("*.json"):
        try:
            user = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if is_alive(user):
            alive.append(int(user["pid"]))
        else:
            path.unlink(missing_ok=True)
    return alive


def _head_address(cfg: ClusterConfig, state: Path) -> str:
    """Address of the running head; starts one under a file lock when there is none."""
    import fcntl

    (state / "logs").mkdir(parents=True, exist_ok=True)
    with (state / "cluster" / "start.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        head = _head(state)
        if head is None:
            head = _start_keeper(cfg, state)
        return str(head["address"])


def _start_keeper(cfg: ClusterConfig, state: Path) -> dict[str, Any]:
    _head_path(state).unlink(missing_ok=True)
    token(state)
    log = state / "logs" / "head.log"
    arguments = [str(state), str(_logical_cpus(cfg)), str(cfg.object_store_mb)]
    with log.open("wb") as output:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "pipelines.cluster", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
                **_private_environment(state),
            },
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        head = _head(state)
        if head is not None:
            return head
        if keeper.poll() is not None:
            break
        time.sleep(0.1)
    keeper.kill()
    raise ResourcesUnavailable(
        f"Ray did not start within {START_TIMEOUT_S:.0f} s: {_last_line(log)} (whole log: {log})"
    )


def _logical_cpus(cfg: ClusterConfig) -> int:
    return cfg.num_cpus or max(4, os.cpu_count() or 1)


def token(state: Path) -> Path:
    """The file that holds this cluster's authentication token, readable by its owner only."""
    path = state / "token"
    if not path.exists():
        state.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_hex(32))
    return path


def _private_environment(state: Path) -> dict[str, str]:
    """A token for every call, and no port outside this machine: without the switch that Ray has for single-node systems
    it replaces 127.0.0.1 by the host's address, and about 25 ports listen on all interfaces."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token(state)),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def _go_private(state: Path) -> None:
    os.environ.pop("RAY_ADDRESS", None)  # a cluster is joined only when the config names it
    os.environ.update(_private_environment(state))


def _init(**arguments: Any) -> None:
    import ray

    try:
        ray.init(namespace="raykeel", log_to_driver=False, logging_level="ERROR", **arguments)
    except (ConnectionError, RuntimeError, ValueError) as error:
        first = str(error).strip().split("\n")[0]
        raise ResourcesUnavailable(f"cannot join the Ray cluster at {arguments.get('address')}: {first}") from error


def _shutdown() -> None:
    import ray

    ray.shutdown()


def _start_here(cfg: ClusterConfig, state: Path) -> None:
    temporary = temp_directory(state)
    temporary.mkdir(mode=0o700, exist_ok=True)
    if temporary.stat().st_uid != os.getuid():
        raise ResourcesUnavailable(
            f"{temporary} belongs to another user; remove it or set TMPDIR to a short directory of your own"
        )
    if len(str(temporary)) > 45:
        raise ResourcesUnavailable(
            f"{temporary} is too long for Ray's sockets ({len(str(temporary))} > 45 bytes): set TMPDIR=/tmp"
        )
    _init(
        address="local",
        num_cpus=_logical_cpus(cfg),
        include_dashboard=False,
        object_store_memory=cfg.object_store_mb * 2**20,
        _temp_dir=str(temporary),
    )


def _require_listening(address: str, timeout_s: float) -> None:
    """Ray itself retries a dead address for minutes."""
    import socket

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ResourcesUnavailable(
            f"cluster.address={address}: write host:port of the Ray head, for example 10.0.0.5:6379"
        )
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except OSError as error:
        raise ResourcesUnavailable(
            f"cluster.address={address} (from the config): nothing answers there ({error})"
        ) from error


def _last_line(log: Path) -> str:
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return lines[-1] if lines else "it said nothing"


def keep(state: Path, num_cpus: int, object_store_mb: int) -> None:
    """The keeper's life: start Ray, record it, wait until nobody needs it or SIGTERM."""
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the run, not for what serves
    cfg = ClusterConfig(num_cpus=num_cpus, object_store_mb=object_store_mb)
    _start_here(cfg, state)
    import ray

    session = ray._private.worker._global_node.get_session_dir_path()
    record = {**identity(), "address": ray.get_runtime_context().gcs_address, "session": session}
    temporary = _head_path(state).with_suffix(".new")
    temporary.write_text(json.dumps(record))
    temporary.replace(_head_path(state))
    idle_since = time.monotonic()
    while not stopping:
        time.sleep(0.5)
        if _users(state) or endpoint_record(state):
            idle_since = time.monotonic()
        elif time.monotonic() - idle_since > IDLE_EXIT_S:
            break
    ray.shutdown()
    _head_path(state).unlink(missing_ok=True)


if __name__ == "__main__":
    quiet()
    keep(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
