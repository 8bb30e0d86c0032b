"""What `make doctor` asks of the machine itself: libraries, cores, memory, disks, ports, clock, GPU. Apart from its services, because
nothing here is started or connected to.
"""

import contextlib
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

import psutil

from pipelines import cluster
from pipelines.config import ROOT, AppConfig, ClusterMode
from pipelines.room import FREE_DISK_MB

ASK_S = 20.0
"""For the driver's and PyTorch's answer."""
ROOMY_DISK_MB = 5_000
ROOMY_MEMORY_MB = 4_000
SMALL_MEMORY_MB = 2_000
FEW_INODES = 10_000


@dataclass(frozen=True)
class Line:
    """What one check found."""

    state: str
    """ok, warning or problem."""
    found: str
    advice: str = ""


def ok(found: str) -> Line:
    return Line("ok", found)


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
        seen = subprocess.run(query, capture_output=True, text=True, timeout=ASK_S / 2, check=True).stdout.splitlines()
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
    asked = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=ASK_S)
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


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


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
