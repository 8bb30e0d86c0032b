"""How training is computed: settings that never change its result. Apart and free of torch, because every verb that trains
has the same."""

import importlib.metadata
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from stages.contract import StageResources

POSSIBLY_ZERO = ("gpus_per_worker", "max_failures", "retries")


class Sharding(Enum):
    """What each worker holds of a model in training."""

    none = "none"
    full = "full"


class Launcher(Enum):
    """Who starts the training processes."""

    ray = "ray"
    torchrun = "torchrun"
    inline = "inline"


@dataclass(kw_only=True)
class TrainResources(StageResources):
    """How training is computed; none of it changes the result beyond rounding."""

    launcher: Launcher = Launcher.ray
    """`ray`: Ray Train workers. `torchrun`: the same workers under torchrun's agent, on this machine, without Ray. `inline`:
    one process, this one; for debugging and comparison."""
    workers: int = 2
    """Data-parallel workers under `ray` and `torchrun`, one process each; `inline` always has one."""
    cpus_per_worker: float = 1.0
    """Logical CPUs that Ray reserves for each worker; the other launchers reserve none and count threads_per_worker."""
    gpus_per_worker: int | None = None
    """GPUs that Ray reserves for each worker: 1, or 0 to compute on processors though there are GPUs. null: 1 where the stage's
    node has any and PyTorch is built for them, with at most as many workers as GPUs (unless sharding splits the model), else 0.
    The other launchers reserve none: a worker of torchrun takes the GPU of its number."""
    threads_per_worker: int = 1
    """Threads of one worker's tensor operations (also OMP_NUM_THREADS)."""
    micro_batch_rows: int = 8
    """Packed rows in one forward pass of one worker; less needs less memory."""
    sharding: Sharding = Sharding.none
    """`none`: each worker holds the whole model, gradients are summed (DDP). `full`: weights, gradients and optimizer state are
    split over the workers, and a layer is gathered while it computes (FSDP2): less memory, more communication."""
    checkpoint_every: int = 100
    """Optimizer steps between resumable checkpoints in the work directory."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay until the stage is done, beside the best one where that is exported."""
    gradient_checkpointing: bool = False
    """Compute layers again in the backward pass instead of keeping what they made: about a third slower, and the memory of
    one layer instead of all. The result is the same to the last bit."""
    peak_tflops: float | None = None
    """What one worker's device multiplies at most, in 10^12 operations a second, in the precision of training: the
    denominator of the model FLOPs utilisation. null: the data sheet's number of a known GPU, and none for a CPU."""
    max_failures: int = 3
    """How often dead workers are replaced before the stage fails."""
    worker_start_timeout_s: int = 60
    """Seconds that workers may take to be placed by Ray."""
    collective_timeout_s: int = 120
    """Seconds that a worker may wait for the others before the attempt counts as failed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in asdict(self).items():
            if type(value) in (int, float) and name not in POSSIBLY_ZERO and value <= 0:
                raise ValueError(f"resources.{name} must be above 0, got {value}")
        if self.gpus_per_worker not in (None, 0, 1):
            raise ValueError(
                f"resources.gpus_per_worker must be 0 or 1, got {self.gpus_per_worker}: a worker computes on one device; "
                "set resources.workers to the number of GPUs"
            )
        if self.sharding is Sharding.full and (self.launcher is Launcher.inline or self.workers < 2):
            raise ValueError(
                "resources.sharding must be none with one worker, got full; set resources.workers and a launcher that starts them"
            )
        if self.max_failures < 0:
            raise ValueError(f"resources.max_failures must be 0 or more, got {self.max_failures}")

    def of_job(self) -> dict[str, Any]:
        """What of this the loop is told: fields of `stages.training.config.Job`."""
        names = ["micro_batch_rows", "checkpoint_every", "keep_checkpoints", "gradient_checkpointing", "peak_tflops"]
        names += ["collective_timeout_s"]
        told = {name: getattr(self, name) for name in names}
        return told | {"threads": self.threads_per_worker, "sharded": self.sharding is Sharding.full}

    def placed(self, gpus: float) -> "TrainResources":
        """With gpus_per_worker decided, for Ray's workers on a node that has so many `gpus`."""
        if self.gpus_per_worker is not None:
            return self
        if gpus < 1 or not torch_knows_gpus():
            return replace(self, gpus_per_worker=0)
        split = self.sharding is Sharding.full  # by fewer than were asked for, its parts may be too large
        return replace(self, gpus_per_worker=1, workers=self.workers if split else min(self.workers, int(gpus)))

    def inline(self) -> bool:
        return self.launcher is not Launcher.ray

    def cpus_wanted(self) -> float:
        if self.launcher is Launcher.ray:
            return self.workers * self.cpus_per_worker
        return float(self.threads_per_worker * (self.workers if self.launcher is Launcher.torchrun else 1))


def torch_knows_gpus() -> bool:
    """Whether the installed PyTorch is built for GPUs. Read off its version: importing it takes seconds."""
    return not importlib.metadata.version("torch").endswith("+cpu")
