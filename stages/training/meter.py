"""How fast training runs, what it waits for and what it needs. Apart, because these numbers describe a machine: they go to the
tracker and never into the checkpoint, whose bytes must not depend on them."""

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stages.training.memory import resident, status

BARS = 10


class Meter:
    """Times the steps of this process since its start; what stands between them (validation, checkpoints) is left out."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.waited = 0.0
        self.trained = self.real = 0
        self.padded = 0
        """Positions that this rank computed, padding included."""
        _forget_peak()
        self.before = resident()
        self.clock = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what makes a batch: time in which nothing is trained."""
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    def lap(self, trained: int, real: int) -> float:
        """A step is over: tokens that the loss was taken on, tokens of text, both over all ranks. Returns `trained` a second."""
        now = time.perf_counter()
        self.seconds.append(now - self.clock)
        self.trained, self.real = self.trained + trained, self.real + real
        self.clock = now
        return trained / self.seconds[-1]

    def restart(self) -> None:
        """The next step begins now."""
        self.clock = time.perf_counter()

    def summary(self, padded: float) -> dict[str, float]:
        """Of all steps so far, with what all ranks have `padded`; {} before the first, which also warms up caches."""
        if not self.seconds:
            return {}
        whole = sum(self.seconds)
        steps = sorted(self.seconds)
        return {
            "timed_steps": float(len(steps)),
            "timed_seconds": whole,
            "tokens_per_second_supervised": self.trained / whole,
            "tokens_per_second_unpadded": self.real / whole,
            "tokens_per_second_padded": padded / whole,
            "data_wait_share": self.waited / whole,
            "step_seconds_median": quantile(steps, 0.5),
            "step_seconds_p95": quantile(steps, 0.95),
            "step_seconds_max": steps[-1],
            "peak_memory_bytes": float(peak(self.device)),
            "training_memory_bytes": float(max(0, peak(self.device) - self.before)),
        }

    def histogram(self) -> str:
        """Step times in ten bars of equal width, as text."""
        return histogram(self.seconds)


def quantile(ordered: list[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def histogram(values: list[float]) -> str:
    """Counts between the least and the largest value, one line a bar."""
    if not values:
        return ""
    low, high = min(values), max(values)
    width = (high - low) / BARS or 1.0
    counts = [0] * BARS
    for value in values:
        counts[min(BARS - 1, int((value - low) / width))] += 1
    longest = max(counts)
    lines = [
        f"{low + width * bar:9.4f} s {count:7d} {'#' * round(40 * count / longest)}".rstrip()
        for bar, count in enumerate(counts)
    ]
    return "\n".join(lines) + "\n"


def peak(device: torch.device) -> int:
    """Most bytes that were in use at once: of the GPU's tensors, or of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        return status("VmHWM")
    except (OSError, KeyError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _forget_peak() -> None:
    """Let the peak of this process begin at what it has now (Linux); elsewhere it stays that of its whole life."""
    try:
        descriptor = os.open("/proc/self/clear_refs", os.O_WRONLY)
    except OSError:
        return
    try:
        os.write(descriptor, b"5")
    except OSError:
        return
    finally:
        os.close(descriptor)
