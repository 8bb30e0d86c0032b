"""`make doctor`: is this machine fit for what the configuration asks of it? Apart, because each line tries one thing for real, within a
limit, and leaves nothing: a person reads what was found and what to do, a script reads the exit code (0, or 5 when there is a problem).

A warning is slower, less safe or worth knowing; a problem stops a run.
"""

import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import psutil

from pipelines import cluster
from pipelines.config import ROOT, AppConfig, ClusterConfig, ClusterMode, compose, redacted
from pipelines.console import Console
from pipelines.registry import fetch, tracking_uri
from pipelines.room import FREE_DISK_MB
from pipelines.store import Store
from stages.contract import ResourcesUnavailable
from stages.storage.bucket import BucketError

RAY_LIMIT_S = 60.0
"""From nothing to an answered task takes 12 s on two idle cores."""
LIMIT_S = 20.0
"""For every other line."""
ROOMY_DISK_MB = 5_000
ROOMY_MEMORY_MB = 4_000
SMALL_MEMORY_MB = 2_000
FEW_INODES = 10_000
TINY_HEAD = {"num_cpus": 1, "object_store_mb": 80}
SKEW_S = 60.0
"""Object stores refuse signatures of a clock that is off by 15 minutes."""
MARKS = {"ok": "[green]ok     [/]", "warning": "[yellow]warning[/]", "problem": "[red]problem[/]"}


@dataclass(frozen=True)
class Line:
    """What one check found."""

    state: str
    """ok, warning or problem."""
    found: str
    advice: str = ""


def ok(found: str) -> Line:
    return Line("ok", found)


def doctor(console: Console, overrides: list[str], conf: str | None) -> int:
    app = compose(overrides, conf)
    # The longest one first: it runs while the others are asked and told.
    waiting = [(name, _Check(name, check, app)) for name, check in CHECKS.items()]
    problems = 0
    width = max(len(name) for name in CHECKS)
    for name, check in waiting:
        line = check.line()
        problems += line.state == "problem"
        advice = f"; {line.advice}" if line.advice else ""
        console.verdict(MARKS[line.state], f"{name.ljust(width)}  {line.found}{advice}")
    if problems:
        console.error(f"{problems} of {len(CHECKS)} checks found a problem", 5)
        return 5
    return 0


class _Check:
    """One check in a thread of its own, which is left behind when its time is over."""

    def __init__(self, name: str, check: Callable[[AppConfig], Line], app: AppConfig) -> None:
        self._limit = RAY_LIMIT_S + 10 if check is ray else LIMIT_S
        self._came: list[Line] = []
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(check, app), name=f"doctor-{name}", daemon=True)
        self._thread.start()

    def line(self) -> Line:
        self._thread.join(max(0.0, self._begun + self._limit - time.monotonic()))
        return self._came[0] if self._came else Line("problem", f"no answer within {self._limit:.0f} s")

    def _run(self, check: Callable[[AppConfig], Line], app: AppConfig) -> None:
        try:
            self._came.append(check(app))
        except Exception as error:  # a check that breaks is a finding, and the others are still worth reading
            self._came.append(Line("problem", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))


# The machine


def python(app: AppConfig) -> Line:
    """Interpreter and pinned libraries, against pyproject.toml and constraints.txt."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {name.lower(): version for name, equal, version in (line.partition("==") for line in lines) if equal}
    here = ".".join(map(str, sys.version_info[:3]))
    broken, differ = [], []
    if not Requirement(f"python{project['requires-python']}").specifier.contains(here):
        broken.append(f"Python {here}, wanted {project['requires-python']}")
    for wanted in map(Requirement, project["dependencies"]):
        try:
            found = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            broken.append(f"{wanted.name} is not installed")
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            broken.append(f"{wanted.name} {found}, wanted {wanted.specifier}")
        elif pinned.get(wanted.name.lower(), found) != found:
            differ.append(f"{wanted.name} {found}, pinned {pinned[wanted.name.lower()]}")
    said = f"Python {here}, {len(project['dependencies'])} libraries"
    if broken:
        return Line("problem", f"{said}: {'; '.join(broken)}", "run make setup")
    if differ:
        return Line("warning", f"{said}: {'; '.join(differ)}", "make setup installs the pinned ones")
    return ok(f"{said} as pinned")


def cores(app: AppConfig) -> Line:
    allowed = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    logical = cluster.logical_cpus(app.cluster)
    said = f"{allowed} cores" + (f", of which the control group allows {quota:g}" if quota and quota < allowed else "")
    if min(allowed, quota or allowed) < 2:
        return Line("warning", said, "everything runs, two cores are the smallest size that was measured")
    return ok(f"{said}; a local Ray offers {logical} logical CPUs")


def memory(app: AppConfig) -> Line:
    machine = psutil.virtual_memory()
    limit = _memory_limit()
    total = min(machine.total, limit) if limit else machine.total
    said = f"{total / 2**30:.1f} GiB" + (" (limit of the control group)" if limit and limit < machine.total else "")
    said += f", {machine.available / 2**30:.1f} GiB of the machine's free"
    free = min(total, machine.available) / 2**20
    if total / 2**20 < SMALL_MEMORY_MB:
        return Line("problem", said, f"Ray, MLflow and a small model need {SMALL_MEMORY_MB} MiB")
    if free < ROOMY_MEMORY_MB:
        return Line("warning", said, "stop what holds it, or take smaller models and batches")
    return ok(said)


def disk(app: AppConfig) -> Line:
    """Room and inodes where the store (or its scratch) and the state are."""
    said, worst, advice = [], "ok", ""
    places = {_existing(path): key for path, key in ((app.state_root, "state"), (app.scratch_root, "store.root"))}
    for place, key in places.items():
        status = os.statvfs(place)
        free = status.f_bavail * status.f_frsize / 2**20
        said.append(
            f"{place}: {free / 1024:.1f} GiB and "
            + (f"{status.f_favail} inodes" if status.f_files else "no limit of inodes")
        )
        if not os.access(place, os.W_OK | os.X_OK):
            return Line("problem", f"{place} cannot be written", f"choose another with {key}=<directory>")
        few = bool(status.f_files) and status.f_favail < FEW_INODES
        if free < FREE_DISK_MB or (few and status.f_favail < FEW_INODES / 10):
            worst, advice = "problem", f"free some (make gc), or set {key}=<directory on another disk>"
        elif (free < ROOMY_DISK_MB or few) and worst == "ok":
            worst, advice = "warning", f"free some (make gc), or set {key}=<directory on another disk>"
    return Line(worst, "free: " + ", ".join(said), advice)


def shared_memory(app: AppConfig) -> Line:
    place = Path("/dev/shm")
    if app.cluster.mode is ClusterMode.attach:
        return ok("the attached cluster's own")
    if not place.is_dir():
        return Line("warning", f"there is no {place}", "Ray's object store will be on disk, and slower")
    free, wanted = shutil.disk_usage(place).free / 2**20, app.cluster.object_store_mb
    said = f"{free:.0f} MiB free in {place}, Ray's object store takes up to {wanted}"
    if free < wanted:
        return Line(
            "warning",
            said,
            f"it will be on disk and slower: set cluster.object_store_mb={max(80, int(free * 0.8))}, or give a container --shm-size",
        )
    return ok(said)


def ports(app: AppConfig) -> Line:
    """The endpoint's and the UI's."""
    wanted = {"the MLflow UI": ("127.0.0.1", int(os.environ.get("PORT") or 5000), "make ui PORT=<another>")}
    for name, cfg in app.stages.items():
        if hasattr(cfg, "port") and hasattr(cfg, "host"):
            wanted[name] = (cfg.host, cfg.port, f"stages.{name}.port=<another>, or the next free one is taken")
    endpoint = cluster.endpoint_record(app.state_root)
    ours = urlparse(endpoint["base_url"]).port if endpoint else None
    taken, free = [], []
    for name, (host, port, fix) in wanted.items():
        if port == ours or _is_free(host, port):
            free.append(f"{port} for {name}" + (" (ours)" if port == ours else ""))
        else:
            taken.append((f"{port} for {name}", fix))
    if taken:
        return Line("warning", "taken: " + ", ".join(what for what, _ in taken), "; ".join(fix for _, fix in taken))
    return ok(", ".join(free))


def temporary(app: AppConfig) -> Line:
    """Ray's sockets stand below it, and a socket's path has 107 bytes at most."""
    place = Path(tempfile.gettempdir())
    length = len(os.fsencode(place)) + len("/rk-") + 8
    said = f"{place}: Ray's directory there has {length} of {cluster.SOCKET_ROOM} bytes"
    if app.cluster.mode is not ClusterMode.attach and length > cluster.SOCKET_ROOM:
        return Line("problem", said, "set TMPDIR=/tmp")
    with tempfile.TemporaryDirectory(prefix="rk-") as made:
        (Path(made) / "probe").write_bytes(b"x")
    return ok(said)


def clock(app: AppConfig) -> Line:
    written = (ROOT / "pyproject.toml").stat().st_mtime
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    if time.time() < written:
        return Line(
            "warning", f"{now} is before this checkout was written", "set the clock: records would be out of order"
        )
    return ok(now)


def gpu(app: AppConfig) -> Line:
    torch = importlib.metadata.version("torch")
    if not Path("/dev/nvidia0").exists() and shutil.which("nvidia-smi") is None:
        return ok(f"no GPU: fine, stages run on the CPU (torch {torch})")
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        seen = subprocess.run(
            query, capture_output=True, text=True, timeout=LIMIT_S / 2, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return Line(
            "problem",
            f"nvidia-smi fails ({type(error).__name__})",
            "the driver is not loaded, or its device files are missing here",
        )
    if not seen:
        return ok(f"no GPU that the driver shows (torch {torch})")
    said = f"{len(seen)} x {seen[0]}, torch {torch}"
    code = "import json, torch; print(json.dumps([torch.cuda.is_available(), torch.version.cuda, torch.cuda.device_count()]))"
    asked = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=LIMIT_S
    )
    usable, built_for, count = json.loads(asked.stdout.splitlines()[-1])
    if not built_for:
        return Line("problem", f"{said} is built for the CPU", "make setup TORCH=cuda")
    if not usable:
        return Line(
            "problem",
            f"{said} cannot use it",
            f"update the driver for CUDA {built_for}, or install a torch built for the driver's",
        )
    if count < len(seen):
        return Line("warning", f"{said} sees {count} of them", "CUDA_VISIBLE_DEVICES hides the rest")
    return ok(f"{said} for CUDA {built_for}")


# The services


def ray(app: AppConfig) -> Line:
    """One task, on the attached cluster, on the head that runs, or on a tiny one that is started for it."""
    running = cluster.running_head(app.state_root)
    attached = app.cluster.mode is ClusterMode.attach
    with tempfile.TemporaryDirectory(prefix="rk-d-") as place:
        # A state root of its own: starting a head forgets what was served from the one before.
        state = app.state_root if running and not attached else Path(place)
        asked = {"state": str(state), "address": app.cluster.address, "running": bool(running)}
        command = [sys.executable, "-m", "pipelines.doctor", json.dumps(asked)]
        begun = time.monotonic()
        asking = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        try:
            answer = (asking.communicate(timeout=RAY_LIMIT_S)[0].splitlines() or [""])[-1]
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(asking.pid, signal.SIGKILL)  # its head sees that its owner is gone, and ends
            asking.communicate()
            answer = f"no answer within {RAY_LIMIT_S:.0f} s"
    seconds = time.monotonic() - begun
    where = (
        f"the cluster at {app.cluster.address}"
        if attached
        else "the running head"
        if running
        else "a head started for it"
    )
    if answer == "answered":
        return ok(f"{where} answered a task in {seconds:.0f} s")
    return Line(
        "problem",
        f"{where}: {answer or 'its process died'}",
        "logs are under the state directory (logs/ray, logs/head.log)",
    )


def _ask_ray(state: Path, address: str | None, running: bool) -> str:
    """In a process of its own: a Ray that hangs or crashes is a finding, not the end of the doctor."""
    if address:
        cfg = ClusterConfig(mode=ClusterMode.attach, address=address, connect_timeout_s=LIMIT_S)
    else:
        mode = ClusterMode.local if running else ClusterMode.ephemeral
        cfg = ClusterConfig(mode=mode, **TINY_HEAD)  # type: ignore[arg-type]
    try:
        with cluster.connect(cfg, state):
            import ray as library

            answer = library.remote(num_cpus=0.1)(lambda: "answered").remote()
            return str(library.get(answer, timeout=LIMIT_S))
    except ResourcesUnavailable as error:
        return str(error).replace("\n", " ")


def tracking(app: AppConfig) -> Line:
    """The server's health, or a write lock on the SQLite file."""
    uri = tracking_uri(app.tracking.uri, app.state_root)
    begun = time.monotonic()
    if uri.startswith("http"):
        try:
            fetch(f"{uri.rstrip('/')}/health", app.tracking.timeout_s)
        except OSError as error:
            return Line(
                "problem", f"{redacted(uri)}: {redacted(str(error))}", "start the server, or use tracking=local"
            )
        return ok(f"{redacted(uri)} answers in {1000 * (time.monotonic() - begun):.0f} ms")
    path = Path(uri.removeprefix("sqlite:///"))
    if not path.exists():
        return ok(f"no MLflow store yet; the first run makes {path}")
    try:
        connection = sqlite3.connect(path, timeout=LIMIT_S / 2, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
            connection.execute("ROLLBACK")
        finally:
            connection.close()
    except sqlite3.Error as error:
        return Line(
            "problem", f"{path}: {error}", "end the process that holds it; a full or read-only disk gives this too"
        )
    return ok(f"{path}: {tables} tables, takes a write in {1000 * (time.monotonic() - begun):.0f} ms")


def store(app: AppConfig) -> Line:
    """Put, get, create-if-absent, delete, timed."""
    opened = Store.open(app)
    bucket, made = opened.bucket, _missing_parents(opened.bucket.directory)
    key, data = f".doctor-{uuid.uuid4().hex}", uuid.uuid4().bytes
    try:
        begun = time.monotonic()
        bucket.put(f"{key}/blob", data)
        if bucket.get(f"{key}/blob") != data:
            return Line("problem", f"{opened.root}: gives other bytes back than it was given", "use another store")
        each = 1000 * (time.monotonic() - begun) / 2
        skew = time.time() - bucket.entries(key)[0].modified
        broken = bucket.probe() if not bucket.single_writer else None
    except BucketError as error:
        return Line("problem", str(error), "see store.root, and the credentials in the environment for an object store")
    finally:
        with contextlib.suppress(BucketError):
            bucket.delete([f"{key}/blob"])
        for directory in made:
            with contextlib.suppress(OSError):
                directory.rmdir()
    said = f"{opened.root}: put and get in {each:.1f} ms"
    if broken:
        return Line(
            "problem",
            f"{said}, but {broken}",
            "two runs could publish over each other: use another store, or store.single_writer=true",
        )
    if abs(skew) > SKEW_S:
        return Line("warning", f"{said}; its clock differs by {skew:.0f} s", "set this machine's clock")
    return ok(said + (", one writer only as declared" if bucket.single_writer else ", create-if-absent kept"))


CHECKS: dict[str, Callable[[AppConfig], Line]] = {
    "python": python,
    "cores": cores,
    "memory": memory,
    "disk": disk,
    "shared memory": shared_memory,
    "temporary": temporary,
    "ports": ports,
    "clock": clock,
    "gpu": gpu,
    "store": store,
    "tracking": tracking,
    "ray": ray,
}


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _missing_parents(directory: Path | None) -> list[Path]:
    """The directories that using a store would make, innermost first."""
    return [p for p in (directory, *directory.parents) if not p.exists()] if directory else []


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            return True
        except OSError:
            return False


def _cpu_quota() -> float | None:
    """Cores' worth of time that the control group allows (version 2, then 1); None without a limit."""
    for group in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text().split()
            return int(quota) / int(period)
        with contextlib.suppress(OSError, ValueError):
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            return int(quota) / int(period) if int(quota) > 0 else None
    return None


def _memory_limit() -> int | None:
    for group in _groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                return int((group / name).read_text())
    return None


def _groups(controller: str) -> list[Path]:
    """Directories in which this process's limits may stand: its own control group first, then what a container sees as the root."""
    root, own = Path("/sys/fs/cgroup"), []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                own.append(root / path.lstrip("/"))
            elif controller in controllers.split(","):
                own.append(root / controllers / path.lstrip("/"))
    return [*own, root, root / controller]


if __name__ == "__main__":
    cluster.quiet()
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    said = _ask_ray(Path(arguments["state"]), arguments["address"], arguments["running"])
    sys.stdout.write(f"\n{said}\n")
