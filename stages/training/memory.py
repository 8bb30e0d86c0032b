"""Memory of this machine and of this process. Apart, and free of torch, because a plan asks too."""

from pathlib import Path

GROUP = Path("/sys/fs/cgroup")
LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""(limit, used) of a control group, of its second and of its first version."""


def resident() -> int:
    """Bytes of this process in memory now; 0 where the system does not say."""
    try:
        return status("VmRSS")
    except (OSError, KeyError):
        return 0


def status(name: str) -> int:
    """Bytes in a line of this process's status (Linux)."""
    return _kilobytes(Path("/proc/self/status"), name)


def free_memory() -> int | None:
    """Bytes that this process may still take: of the machine, or of its control group where that allows less. None where the
    system does not say."""
    return _least("MemAvailable", [_number(limit, used) for limit, used in LIMITS])


def total_memory() -> int | None:
    """Bytes that there are at all, for the machine or for its control group. None where the system does not say."""
    return _least("MemTotal", [_number(limit) for limit, _ in LIMITS])


def _least(name: str, limits: list[int | None]) -> int | None:
    try:
        machine = _kilobytes(Path("/proc/meminfo"), name)
    except (OSError, KeyError, ValueError):
        return None
    return min([machine, *(limit for limit in limits if limit is not None)])


def _number(limit: str, used: str | None = None) -> int | None:
    try:
        taken = int((GROUP / used).read_text()) if used else 0
        return int((GROUP / limit).read_text()) - taken
    except (OSError, ValueError):  # no such group, or "max"
        return None


def _kilobytes(file: Path, name: str) -> int:
    fields = dict(line.split(":", 1) for line in file.read_text().splitlines())
    return int(fields[name].split()[0]) * 1024
