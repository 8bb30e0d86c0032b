"""Ray for this project: the only place that calls `ray.init`. Apart, because who starts a cluster must also know how to end it.

A local head is one keeper process (`pipelines/keeper.py`) that holds a private Ray: own address, own short temp directory,
token authentication, no dashboard, no client server. Its death takes all of it down, so one recorded pid is enough to stop
it. It lives while a run uses it or an endpoint is recorded, and ends by itself otherwise, also after a SIGKILL of the run.
`ray start` is not used: it opens fixed ports (10001, 52365), on which two clones of this project would meet.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pipelines.config import ROOT, ClusterConfig, ClusterMode
from pipelines.lease import identity, is_alive, same_host
from stages.contract import ResourcesUnavailable
from stages.serving.endpoint import ask_ready

START_TIMEOUT_S = 90.0
SOCKET_ROOM = 45
"""A Unix socket's path may have 107 bytes, and Ray appends about 60 to its directory."""

_starting: list["subprocess.Popen[bytes]"] = []
"""Heads that this process is waiting for."""
_gave_up = threading.Event()


@dataclass(frozen=True)
class Address:
    """Where a running Ray is, and what a process needs to be let in."""

    address: str
    environment: dict[str, str]
    timeout_s: float
    ship_code: bool = False
    """Its nodes may have another checkout, or none: this one's code goes with the job."""


@contextlib.contextmanager
def provide(cfg: ClusterConfig, state: Path) -> Iterator[Callable[[], Address]]:
    """A Ray for the processes of this run; this one does not join it. Yields what gives its address, and starts it where it is
    not up. Raises ResourcesUnavailable."""
    quiet()
    _gave_up.clear()
    if cfg.mode is ClusterMode.local:
        hold(state)
        try:
            yield lambda: Address(_head_address(cfg, state), _private_environment(state), cfg.connect_timeout_s)
        finally:
            release(state)
    elif cfg.mode is ClusterMode.ephemeral:
        state.mkdir(parents=True, exist_ok=True)
        head, served = _start_keeper(cfg, state, ephemeral=True), endpoint_record(state)
        try:
            yield lambda: Address(str(head["address"]), _private_environment(state), cfg.connect_timeout_s)
        finally:
            _end_process(head)
            forget(state, head)
            forget_endpoint(state, served)
    else:
        assert cfg.address is not None
        given = Address(cfg.address, {}, cfg.connect_timeout_s, ship_code=True)
        _require_listening(given.address, given.timeout_s)
        yield lambda: given


def join(where: Address) -> None:
    """Ray is initialised in this process. Raises ResourcesUnavailable."""
    quiet()
    if where.environment:
        os.environ.pop("RAY_ADDRESS", None)  # a cluster is joined only when the config names it
        os.environ.update(where.environment)
    code = {"py_modules": [str(ROOT / name) for name in ("pipelines", "stages")]} if where.ship_code else None
    _init(address=where.address, runtime_env=code)
    _require_a_cpu(where.timeout_s)


@contextlib.contextmanager
def connect(cfg: ClusterConfig, state: Path) -> Iterator[None]:
    """Ray is initialised in this process inside the block. Raises ResourcesUnavailable."""
    with provide(cfg, state) as address:
        try:
            join(address())
            yield
        finally:
            stop_here()


def hold(state: Path) -> None:
    """Say that this process uses the local head: it stays up until `release`, or until this process is gone."""
    with alone(state):
        user = _user_path(state)
        user.parent.mkdir(parents=True, exist_ok=True)
        user.write_text(json.dumps(identity()))


def release(state: Path) -> None:
    """The head is not needed any more by this process; without other users and without an endpoint it is stopped."""
    with alone(state):
        _user_path(state).unlink(missing_ok=True)
        if not is_needed(state):
            _stop_head(state)


def is_needed(state: Path) -> bool:
    """Whether a run uses the local head, or something is served from it."""
    return bool(_users(state) or endpoint_record(state))


@contextlib.contextmanager
def alone(state: Path) -> Iterator[None]:
    """Nobody else starts, joins or stops the local head meanwhile."""
    path = state / "cluster" / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def start_ahead(cfg: ClusterConfig, state: Path) -> None:
    """Start the local head if there is none, so that it is up when the first stage needs it; `connect` reports failures."""
    quiet()
    with contextlib.suppress(ResourcesUnavailable, OSError):
        _head_address(cfg, state)


def give_up() -> None:
    """The run ends: whoever waits for a head to start waits no longer, and none is started any more."""
    _gave_up.set()
    for keeper in list(_starting):
        keeper.terminate()


def quiet() -> None:
    """No telemetry, no progress bars of the library's own; set before ray is imported, inherited by its workers."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def down(cfg: ClusterConfig, state: Path) -> str | None:
    """Stop this project's head, and with it what it serves; on an attached cluster, what this project serves there. Returns a
    sentence, or None when nothing ran."""
    served = endpoint_record(state)
    if cfg.mode is ClusterMode.attach:
        return _withdraw(cfg, state, served) if served else None
    with alone(state):
        head = running_head(state)
        if served and head is None and ask_ready(served["base_url"]):
            raise ResourcesUnavailable(
                f"{served['base_url']} answers, but not from this project's own Ray: say cluster=attach "
                "cluster.address=<host:port> to stop it"
            )
        endpoint_path(state).unlink(missing_ok=True)
        return _stop_head(state)


def _withdraw(cfg: ClusterConfig, state: Path, served: dict[str, Any]) -> str:
    """Delete the application on somebody else's cluster, which goes on."""
    with connect(cfg, state):
        from ray import serve

        serve.delete(served["application"])
    endpoint_path(state).unlink(missing_ok=True)
    return f"stopped serving {served['model']}@{served['version']}; the Ray at {cfg.address} goes on"


def _stop_head(state: Path) -> str | None:
    head = running_head(state)
    if head is None:
        return None
    _end_process(head)
    forget(state, head)
    return f"stopped the Ray head (process {head['pid']}) and what it served"


def _end_process(head: dict[str, Any]) -> None:
    family: list[psutil.Process] = []
    try:
        process = psutil.Process(head["pid"])
        family = [process, *process.children(recursive=True)]
        process.terminate()
        process.wait(timeout=20)
    except psutil.TimeoutExpired:
        process.kill()
    except psutil.NoSuchProcess:
        pass
    # The raylet ends its workers itself; whoever is left after that is ended here, by identity and never by name.
    _, left = psutil.wait_procs(family, timeout=5)
    for straggler in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            straggler.kill()


def forget(state: Path, head: dict[str, Any]) -> None:
    """Remove an ended head's record and directory; its logs stay under `logs/ray`."""
    kept = state / "logs" / "ray"
    shutil.rmtree(kept, ignore_errors=True)
    with contextlib.suppress(OSError, shutil.Error):
        shutil.copytree(Path(head["session"]) / "logs", kept, ignore_dangling_symlinks=True)
    shutil.rmtree(head["directory"], ignore_errors=True)
    for record in (head_path(state), ephemeral_path(state, os.getpid())):
        if _read(record) == head:
            record.unlink(missing_ok=True)


def forget_endpoint(state: Path, before: dict[str, Any] | None) -> None:
    """What was deployed on a head that ended is gone with it; what another Ray serves, before or since, is recorded as before."""
    now = endpoint_record(state)
    if now is None or now == before or ask_ready(str(now.get("base_url"))):
        return
    if before is None:
        endpoint_path(state).unlink(missing_ok=True)
        return
    fresh = endpoint_path(state).with_suffix(".before")
    fresh.write_text(json.dumps(before, indent=2, sort_keys=True) + "\n")
    fresh.replace(endpoint_path(state))


def endpoint_path(state: Path) -> Path:
    return state / "endpoint.json"


def endpoint_record(state: Path) -> dict[str, Any] | None:
    """What `deploy` recorded of the live endpoint, or None."""
    return _read(endpoint_path(state))


def running_head(state: Path) -> dict[str, Any] | None:
    """The recorded head (pid, address, session and its directory) if its process lives."""
    head = _recorded_head(state)
    return head if head and is_alive(head) else None


def _recorded_head(state: Path) -> dict[str, Any] | None:
    return _read(head_path(state))


def head_path(state: Path) -> Path:
    return state / "cluster" / "head.json"


def ephemeral_path(state: Path, owner: int) -> Path:
    """Record of the head that ends with process `owner`."""
    return state / "cluster" / f"ephemeral-{owner}.json"


def _user_path(state: Path) -> Path:
    return state / "cluster" / "users" / f"{os.getpid()}.json"


def _users(state: Path) -> list[int]:
    """Pids of live runs on the head."""
    alive = []
    for path in (state / "cluster" / "users").glob("*.json"):
        user = _read(path)
        if user and is_alive(user):
            alive.append(int(user["pid"]))
        elif user and same_host(user):
            path.unlink(missing_ok=True)
    return alive


def _read(path: Path) -> dict[str, Any] | None:
    try:
        loaded: dict[str, Any] = json.loads(path.read_text())
        return loaded
    except (OSError, ValueError):
        return None


def _head_address(cfg: ClusterConfig, state: Path) -> str:
    """Address of the running head; starts one when there is none."""
    with alone(state):
        head = running_head(state) or _start_keeper(cfg, state)
        return str(head["address"])


def _start_keeper(cfg: ClusterConfig, state: Path, *, ephemeral: bool = False) -> dict[str, Any]:
    """A new head: this project's, or one of this process alone. Returns its record."""
    if _gave_up.is_set():
        raise ResourcesUnavailable("Ray was not started: the run ends")
    arguments = [str(state), str(logical_cpus(cfg)), str(cfg.object_store_mb)]
    record = head_path(state)
    if ephemeral:
        record = ephemeral_path(state, os.getpid())
        arguments.append(json.dumps(identity()))
    elif dead := _recorded_head(state):
        forget(state, dead)
    record.parent.mkdir(parents=True, exist_ok=True)
    if not ephemeral:
        endpoint_path(state).unlink(missing_ok=True)  # this project's head starts now: it serves nothing yet
    (state / "logs").mkdir(parents=True, exist_ok=True)
    log = state / "logs" / "head.log"
    search = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    with log.open("wb") as output:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "pipelines.keeper", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": search, **_private_environment(state)},
        )
    _starting.append(keeper)
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        while keeper.poll() is None and time.monotonic() < deadline:
            head = _read(record)
            if head and is_alive(head):
                return head
            time.sleep(0.1)
    finally:
        _starting.remove(keeper)
    how = (
        f"ended with code {keeper.returncode}"
        if keeper.poll() is not None
        else f"is not up after {START_TIMEOUT_S:.0f} s"
    )
    keeper.kill()
    raise ResourcesUnavailable(f"Ray did not start: its process {how}: {_last_line(log)} (whole log: {log})")


def logical_cpus(cfg: ClusterConfig) -> int:
    """CPUs that a head of our own offers."""
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


def _init(**arguments: Any) -> None:
    import ray

    try:
        ray.init(namespace="raykeel", log_to_driver=False, logging_level="ERROR", **arguments)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        # On a version mismatch the versions of both sides stand on the later lines.
        said = " ".join(str(error).split())[:500]
        if "Failed to connect" in said:  # all that Ray says of a token that is not the cluster's
            mode, path = (os.environ.get(name, "not set") for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"))
            said += f"; is it a Ray head, and this its token: RAY_AUTH_MODE {mode}, RAY_AUTH_TOKEN_PATH {path}?"
        raise ResourcesUnavailable(f"cannot join the Ray cluster at {arguments.get('address')}: {said}") from error


def _require_a_cpu(timeout_s: float) -> None:
    """Data tasks wait for ever on a cluster without CPUs, and silently on one that others fill."""
    import ray

    deadline = time.monotonic() + timeout_s
    while ray.available_resources().get("CPU", 0.0) < 1.0:
        total = ray.cluster_resources().get("CPU", 0.0)
        if total < 1.0 or time.monotonic() > deadline:
            raise ResourcesUnavailable(
                f"a stage needs 1 CPU at least; the cluster has {total:g} and none of them came free in {timeout_s:.0f} s: "
                f"start it with CPUs (cluster.num_cpus for a local one) or stop what holds them"
            )
        time.sleep(0.2)


def stop_here() -> None:
    """Leave the cluster, or end it when it was started in this process."""
    import ray

    ray.shutdown()


def short_directory() -> Path:
    """A private directory whose path is short enough for Ray's sockets. Raises ResourcesUnavailable."""
    directory = Path(tempfile.mkdtemp(prefix="rk-"))  # mode 0700; Ray makes its own below it, open to all
    if len(str(directory)) > SOCKET_ROOM:
        directory.rmdir()
        raise ResourcesUnavailable(
            f"{directory} is too long for Ray's sockets ({len(str(directory))} > {SOCKET_ROOM} bytes): set TMPDIR=/tmp"
        )
    return directory


def start_here(cfg: ClusterConfig, directory: Path) -> str:
    """Start a private Ray in this process; returns its address."""
    from ray._private import services

    # With usage statistics off, the dashboard process still asks the cloud's metadata address where it runs. Without a
    # dashboard that is all it does, so it is not started: 120 MB and one port less.
    services.start_api_server = lambda *arguments, **options: ("", None)
    _init(
        address="local",
        num_cpus=logical_cpus(cfg),
        include_dashboard=False,
        object_store_memory=cfg.object_store_mb * 2**20,
        _temp_dir=str(directory / "r"),
    )
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _require_listening(address: str, timeout_s: float) -> None:
    """Ray itself retries a dead address for minutes."""
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
