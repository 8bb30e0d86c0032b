"""What a benchmark knows of the machine: what it is, whether it is idle, what processes use, and where to work. Apart from
the harness, which is arithmetic alone."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("ray", "torch", "transformers", "tokenizers", "mlflow", "hydra-core", "pyarrow", "numpy", "uvicorn")
LEFT_OUT = ("OMP_", "MKL_", "RAY_", "RAYKEEL_", "MLFLOW_", "TORCH", "NCCL_", "GLOO_")
"""Variables that would give one arm what the other has not."""


def environment() -> dict[str, Any]:
    """What a number depends on. No host name and no path."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=10)
        return done.stdout.strip()

    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "cpu": cpu.group(1) if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libraries": versions,
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no")),
    }


@dataclass(frozen=True)
class CpuTimes:
    """Counters of all cores together, in seconds."""

    total: float
    idle: float
    steal: float

    @classmethod
    def now(cls) -> "CpuTimes":
        times = psutil.cpu_times()
        counted = times.user + times.system + times.idle + times.iowait + times.irq + times.softirq + times.steal
        return cls(counted, times.idle + times.iowait, times.steal)

    def busy_since(self) -> float:
        """Share of all cores that was in use since this moment."""
        now = CpuTimes.now()
        return 1 - (now.idle - self.idle) / max(now.total - self.total, 1e-9)

    def steal_since(self) -> float:
        """Share of all cores that the hypervisor took since this moment."""
        now = CpuTimes.now()
        return (now.steal - self.steal) / max(now.total - self.total, 1.0)


def wait_quiet(timeout_s: float, busy_limit: float) -> dict[str, float]:
    """Wait until the cores are idle for two seconds, at most `timeout_s`; what was found last. The load average decays for
    minutes after one's own last bench, so it is recorded and the cores are asked instead."""
    deadline = time.monotonic() + timeout_s
    while True:
        before = CpuTimes.now()
        time.sleep(2.0)
        busy = before.busy_since()
        if busy <= busy_limit or time.monotonic() >= deadline:
            return {"load_average": round(os.getloadavg()[0], 2), "busy": round(busy, 3)}


class Processes:
    """All processes below some roots, also those that were handed over to init meanwhile."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}

    def add(self, pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._known[pid] = psutil.Process(pid)

    def alive(self) -> list[psutil.Process]:
        self._known = {pid: process for pid, process in self._known.items() if process.is_running()}
        children: dict[int, list[int]] = {}
        for pid in psutil.pids():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(pid)
        waiting = list(self._known)
        while waiting:
            for pid in children.get(waiting.pop(), []):
                if pid not in self._known:
                    self.add(pid)
                    waiting.append(pid)
        return list(self._known.values())

    def pss_mb(self) -> float:
        """Proportional set size: a page shared by n processes counts 1/n in each, so that the sum counts it once."""
        return sum(pss_kb(process.pid) for process in self.alive()) / 1000

    def cpu_s(self) -> float:
        """User and system seconds of those that live."""
        total = 0.0
        for process in self.alive():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def pss_kb(pid: int) -> int:
    """0 for a process that is gone or is another user's."""
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found.group(1)) if found else 0


class PeakMemory:
    """Samples the summed PSS in a thread; `peak_mb` is the largest sum seen. Every half second it took 11 % of a core."""

    EVERY_S = 2.0

    def __init__(self, processes: Processes, every_s: float = EVERY_S) -> None:
        self.processes, self.every_s = processes, every_s
        self.peak_mb = 0.0
        self.at_peak: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self.every_s):
            total = self.processes.pss_mb()
            if total > self.peak_mb:
                self.peak_mb = total
                self.at_peak = sorted(_title(p) for p in self.processes.alive())


def _title(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "gone"


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without what belongs to one launcher; first-party packages importable."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LEFT_OUT) and k not in ("TEXT", "CONF", "PORT")}
    return {**kept, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **more}


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path, environ: Mapping[str, str], cwd: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own group; whatever of the group is left at the end is killed."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(command: Sequence[str], log: Path, environ: Mapping[str, str], timeout_s: float) -> None:
    """Run to the end. RuntimeError with the log's last lines when it fails or takes too long."""
    with started(command, log, environ) as process:
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{command[1:4]} took more than {timeout_s:.0f} s\n{tail(log)}") from None
    if code:
        raise RuntimeError(f"{command[1:4]} ended with {code}\n{tail(log)}")


@dataclass(frozen=True)
class Usage:
    """What one command took, with all processes that it waited for."""

    wall_s: float
    cpu_s: float
    read_bytes: int
    """Through read calls, from the page cache or not (`rchar`); what is mapped into memory is not in it."""


def timed(
    command: Sequence[str], log: Path, environ: Mapping[str, str], *, cwd: Path = ROOT, timeout_s: float = 300.0
) -> Usage:
    """Run to the end and say what it took. RuntimeError with the log's last lines when it fails or takes too long."""
    before, began = _read_bytes(), time.perf_counter()
    with started(command, log, environ, cwd) as process:
        leash = threading.Timer(timeout_s, os.killpg, (process.pid, signal.SIGKILL))
        leash.start()
        try:
            _, status, used = os.wait4(process.pid, 0)
        finally:
            leash.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - began
    if process.returncode:
        raise RuntimeError(f"{list(command)[1:4]} ended with {process.returncode}\n{tail(log)}")
    return Usage(wall, used.ru_utime + used.ru_stime, _read_bytes() - before)


def _read_bytes() -> int:
    """Bytes read by this process and, since the kernel adds them up at each wait, by all that it waited for."""
    return int(Path("/proc/self/io").read_text().split()[1])


def tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def python(*words: str) -> list[str]:
    return [sys.executable, *words]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A short temporary directory whose `state` may hold a Ray head; both are gone afterwards."""
    from pipelines import cluster
    from pipelines.config import ClusterConfig

    directory = Path(tempfile.mkdtemp(prefix="rkb-"))
    try:
        yield directory
    finally:
        cluster.down(ClusterConfig(), directory / "state")
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def local_head(state: Path) -> Iterator[int]:
    """This project's own head, up and serving nothing, as a run finds it; yields the keeper's pid."""
    from pipelines import cluster
    from pipelines.config import ClusterConfig

    with cluster.provide(ClusterConfig(), state) as address:
        address()
        head = cluster.running_head(state)
        assert head is not None
        yield int(head["pid"])
    cluster.down(ClusterConfig(), state)
