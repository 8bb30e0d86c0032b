"""One rank of a training job, whoever launched it: trains, and leaves its error where the driver looks. Apart, because only
the death of a process is worth another try, and no launcher can tell that from an error that would come again.
"""

import json
import os
import time
import traceback

from stages.contract import ResourcesUnavailable, StageError
from stages.training.config import Job
from stages.training.resources import TrainResources

REFUSED, TRACES = "refused.json", "traces"


def environment(resources: TrainResources) -> dict[str, str]:
    """Variables of every worker, whoever starts it: those that torchrun sets, and Ray Train does not."""
    return {"OMP_NUM_THREADS": str(resources.threads_per_worker), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def train(job: Job) -> None:
    """`loop.run` as a rank of a launched world. Any error but a lost peer is left in a file that makes the driver stop at once."""
    from stages.training.loop import run

    try:
        run(job)
    except Exception as error:
        rank = os.environ.get("RANK", "0")
        (job.work / TRACES).mkdir(parents=True, exist_ok=True)
        trace = job.work / TRACES / f"rank-{rank}-{time.time_ns()}.txt"
        trace.write_text(traceback.format_exc(), "utf-8")
        if isinstance(error, StageError):
            refuse(job, str(error), unavailable=isinstance(error, ResourcesUnavailable))
        elif not _lost_peer(error):
            refuse(job, f"training worker {rank}: {type(error).__name__}: {error}; traceback in {trace}")
        raise


def stop_if_refused(job: Job) -> None:
    """StageError with what a rank has left. Asked by the driver while it waits."""
    if (job.work / REFUSED).exists():
        left = json.loads((job.work / REFUSED).read_text("utf-8"))
        raise (ResourcesUnavailable if left["unavailable"] else StageError)(left["message"])


def _lost_peer(error: Exception) -> bool:
    import torch.distributed

    return (
        isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower() or "nccl" in str(error).lower()
    )


def refuse(job: Job, message: str, *, unavailable: bool = False) -> None:
    temporary = job.work / f"{REFUSED}.{os.getpid()}"
    temporary.write_text(json.dumps({"message": message, "unavailable": unavailable}), "utf-8")
    temporary.replace(job.work / REFUSED)
