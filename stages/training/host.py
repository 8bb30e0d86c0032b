"""How busy the machine of worker 0 is while it trains. Apart from the meter, which times the steps: these numbers say what stood
in their way. Names and units are MLflow's own, whose UI shows what begins with `system/` on a page of its own.
"""

import time
from pathlib import Path

import psutil
import torch

from stages.training.memory import resident

EVERY_S = 10.0
"""Seconds between two samples; the share of the processors is the mean of these."""
MEGABYTE = 1e6


class Host:
    """Samples of processors, memory, disk, network and this process's GPU, none more often than `every_s`."""

    def __init__(self, work: Path, device: torch.device, every_s: float = EVERY_S) -> None:
        self.work, self.device, self.every_s = work, device, every_s
        self.before = psutil.net_io_counters()
        psutil.cpu_percent()  # its first answer is of no time at all
        self.next = time.monotonic() + every_s

    def sample(self) -> dict[str, float]:
        """{"system/...": value}, or {} when the last one is fresh."""
        now = time.monotonic()
        if now < self.next:
            return {}
        self.next = now + self.every_s
        memory, disk, network = psutil.virtual_memory(), psutil.disk_usage(str(self.work)), psutil.net_io_counters()
        found = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / MEGABYTE,
            "system_memory_usage_percentage": 100 * memory.used / memory.total,
            "process_memory_usage_megabytes": resident() / MEGABYTE,
            "disk_usage_percentage": disk.percent,
            "disk_available_megabytes": disk.free / MEGABYTE,
            "network_receive_megabytes": (network.bytes_recv - self.before.bytes_recv) / MEGABYTE,
            "network_transmit_megabytes": (network.bytes_sent - self.before.bytes_sent) / MEGABYTE,
            **self._gpu(),
        }
        return {f"system/{name}": round(value, 1) for name, value in found.items()}

    def _gpu(self) -> dict[str, float]:
        if self.device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self.device)
        name = f"gpu_{self.device.index or 0}"
        return {
            f"{name}_memory_usage_megabytes": (total - free) / MEGABYTE,
            f"{name}_memory_usage_percentage": 100 * (total - free) / total,
        }
