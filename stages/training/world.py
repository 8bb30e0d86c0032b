"""Where this process stands among the workers, and an environment that makes its arithmetic repeatable. Apart, because it
is all that the loop knows about launchers: Ray Train, torchrun and a plain call differ in nothing else."""

import math
import os
import platform
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from stages.training.device import of_this_worker

CPU = torch.device("cpu")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""By the kind of device. gloo sums what World.sum gives it, which stays on the processor; gradients on GPUs go through nccl."""
SHOWN = ("OMP_", "MKL_", "NCCL_", "TORCH", "GLOO_", "CUDA_", "MASTER_", "LOCAL_", "NODE_RANK", "RANK", "WORLD_SIZE")
ALONE = timedelta(days=1)
"""How long the others wait for an export. A rank that dies ends it at once, the stage's own `timeout` before."""


@dataclass(frozen=True)
class World:
    """The process group as one process sees it."""

    rank: int
    size: int
    device: torch.device = CPU
    """Where this process computes."""

    def sum(self, value: float) -> float:
        """The sum over all ranks, in double precision: the same number on each."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64)
        torch.distributed.all_reduce(tensor)
        return float(tensor)

    def share(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        if self.size == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def passes(self, rows: int, batch_rows: int) -> int:
        """Batches of the rank that has most of `rows`, which are dealt out one by one."""
        most = math.ceil(rows / self.size)
        return math.ceil(most / batch_rows)

    def wait(self) -> None:
        """Returns when every rank has come here."""
        self.sum(0.0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what one rank does alone and what may take longer than a collective: the others wait at its end."""
        if self.size == 1:
            yield
            return
        group = torch.distributed.new_group(backend="gloo", timeout=ALONE)
        yield
        torch.distributed.barrier(group=group)


@contextmanager
def joined(timeout_s: int) -> Iterator[World]:
    """The process group that a launcher has made, or that RANK and WORLD_SIZE describe, or this process alone."""
    device = of_this_worker()
    if torch.distributed.is_initialized():
        yield World(torch.distributed.get_rank(), torch.distributed.get_world_size(), device)
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group(BACKENDS[device.type], timeout=timedelta(seconds=timeout_s))
        yield World(torch.distributed.get_rank(), torch.distributed.get_world_size(), device)
        # Not after an error: what still hangs on the group (the error's own frames) can make this wait for ever.
        torch.distributed.destroy_process_group()
    else:
        yield World(0, 1, device)


@contextmanager
def repeatable(threads: int) -> Iterator[None]:
    """A fixed number of threads and deterministic kernels: sums are taken in one order, so that a resumed run is bitwise
    the undisturbed one. Restored on leaving."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that writes every new tensor twice
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


def environment(world: World) -> dict[str, Any]:
    """What a run's speed and its last bits depend on, and nothing that names a secret."""
    return {
        "rank": world.rank,
        "world_size": world.size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "torch_interop_threads": torch.get_num_interop_threads(),
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(SHOWN)},
    }
