"""Runs a training job where its resources say, and takes over the exported model. Apart from the verbs, because all that
train launch alike; apart from `stages.training`, which knows no launcher. Ray's part:

    driver --(task)--> fit() --> controller --> one worker a rank, each calling `loop.run`

`fit()` runs in a task of its own: in a driver's main thread it would take Ctrl-C for itself, and what it started dies
with its process.
"""

import multiprocessing
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.artifacts import Checkpoint, PairDataset, TokenDataset
from stages.contract import Context, StageError
from stages.launching import rank
from stages.launching.torchrun import under_torchrun
from stages.training.config import Job
from stages.training.preflight import require
from stages.training.report import Report
from stages.training.resources import Launcher, TrainResources

PLACED = "placement_group"
POLL_S = 0.25
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
"""Ray hides no GPU from a worker that has reserved none."""


def launch(resources: TrainResources, ctx: Context, job: Job) -> Checkpoint:
    """Train to the end and copy the export into `ctx.output`. Goes on from what an earlier attempt left in `job.work`."""
    # As multiprocessing asks, but only before it starts one more process: here that would be after all of the training.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise StageError(
            "a process that was started to help with training imports your script, which would begin to train again: call "
            f'{job.verb} under `if __name__ == "__main__":`'
        )
    (job.work / rank.REFUSED).unlink(missing_ok=True)
    shutil.rmtree(job.work / rank.TRACES, ignore_errors=True)
    report = Report(ctx, job.work)
    if resources.launcher is Launcher.inline:
        from stages.training.loop import run

        run(job, report.poll)
    elif resources.launcher is Launcher.torchrun:
        under_torchrun(resources, ctx, job, report)
    else:
        _under_ray(resources, ctx, job, report)
    report.finish()
    from stages.training.reloaded import require_equal

    ctx.progress(1.0, "loading the export in a fresh process")
    require_equal(job.work / "export", job.work / "expected")
    shutil.copytree(job.work / "export", ctx.output, dirs_exist_ok=True)
    return Checkpoint(uri=ctx.output.resolve().as_uri())


def log_datasets(ctx: Context, dataset: TokenDataset | PairDataset) -> None:
    """Tell the tracker what is trained and validated on, with its numbers."""
    summary = dataset.summary()
    for split, purpose in (("train", "training"), ("validation", "validation")):
        profile = {name: float(number) for name, number in summary[split].items()}
        ctx.tracker.log_dataset(split, dataset, purpose, profile)


def _under_ray(resources: TrainResources, ctx: Context, job: Job, report: Report) -> None:
    import ray

    from stages.storage.node import facts, here

    nodes, free = facts(), ray.available_resources
    resources = resources.placed(max((node["Resources"].get("GPU", 0.0) for node in nodes), default=0.0))
    for kind, each in (("CPU", resources.cpus_per_worker), ("GPU", resources.gpus_per_worker)):
        if each:
            fields = [f"stages.{job.verb}.resources.{name}" for name in ("workers", f"{kind.lower()}s_per_worker")]
            require(kind, workers=resources.workers, each=each, nodes=nodes, free=free, fields=(fields[0], fields[1]))
    (job.work / PLACED).unlink(missing_ok=True)
    ctx.progress(0.0, f"starting {resources.workers} workers")
    fit = ray.remote(num_cpus=0, max_retries=0, max_calls=1, scheduling_strategy=here())(_fit)
    outcome = fit.remote(job, resources, ctx.fingerprint)
    try:
        while not ray.wait([outcome], timeout=POLL_S)[0]:
            report.poll()
            if (job.work / rank.REFUSED).exists():
                ray.wait([outcome], timeout=5.0)  # `fit()` is about to return
            rank.stop_if_refused(job)
        error = ray.get(outcome)
    except BaseException as stopped:
        _take_down(outcome, job.work)
        if isinstance(stopped, SystemError) and stopped.__cause__ is not None:
            raise stopped.__cause__ from None  # what Ray's C code makes of a Ctrl-C that arrives inside its wait
        raise
    report.poll()
    rank.stop_if_refused(job)
    if error:
        raise StageError(f"{error}; the workers' tracebacks are in {job.work / rank.TRACES}")


def _take_down(outcome: Any, work: Path) -> None:
    """Kill the process of `fit()`: the controller dies with its owner and the workers with theirs, within half a second.
    Their placement group would stay until this driver ends, so it is removed by the id that the workers left (one that was
    still being filled does end with the driver)."""
    import ray
    from ray.util.placement_group import PlacementGroup

    # A forced cancel that meets the task's reply ends this process (a failed check in Ray): only a task that still runs.
    if not ray.wait([outcome], timeout=0.0)[0]:
        ray.cancel(outcome, force=True, recursive=False)
        ray.wait([outcome], timeout=5)
    if (work / PLACED).exists():
        ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex((work / PLACED).read_text())))


def _fit(job: Job, resources: TrainResources, fingerprint: str) -> str | None:
    """In a Ray task: run Ray Train to its end. None, or the error in one line."""
    os.environ.update(
        RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S=str(resources.worker_start_timeout_s),
        RAY_TRAIN_COLLECTIVE_TIMEOUT_S=str(resources.collective_timeout_s),
        RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.5",
    )
    import torch
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback
    from ray.train.v2.api.config import LoggingConfig
    from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError

    from stages.storage.node import selector
    from stages.training.world import BACKENDS

    class NotAfterRefusal(WorkerGroupCallback):
        """Starts no workers for an error that would come again. They would also hold a placement group that the driver,
        which takes this process down, cannot know yet."""

        def before_worker_group_start(self, worker_group_context: Any) -> None:
            rank.stop_if_refused(job)

    class Trainer(TorchTrainer):
        """Without the detached cleaner: it asks a dashboard whether the controller lives, and without one stays for ever."""

        def _create_default_callbacks(self) -> list[Any]:
            kept = [c for c in super()._create_default_callbacks() if not isinstance(c, PlacementGroupCleanerCallback)]
            return [*kept, NotAfterRefusal()]

    gpus = resources.gpus_per_worker or 0
    # Where torch is not built for the GPU that is reserved, the workers start all the same: they say so better than nccl does.
    backend = BACKENDS["cuda" if gpus and torch.version.cuda else "cpu"]
    trainer = Trainer(
        _worker,
        train_loop_config={"job": job, "gpus": gpus},
        torch_config=TorchConfig(backend=backend, timeout_s=resources.collective_timeout_s),
        scaling_config=ScalingConfig(
            num_workers=resources.workers,
            use_gpu=gpus > 0,
            resources_per_worker={"CPU": resources.cpus_per_worker, "GPU": gpus},
            label_selector=selector(),
        ),
        run_config=RunConfig(
            name=fingerprint,
            storage_path=str(job.work / "ray"),
            failure_config=FailureConfig(max_failures=resources.max_failures, controller_failure_limit=2),
            worker_runtime_env={"env_vars": rank.environment(resources) | ({} if gpus else HIDDEN)},
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )
    try:
        trainer.fit()
    except WorkerGroupError as error:
        causes = {rank: str(cause).strip().splitlines()[-1:] for rank, cause in error.worker_failures.items()}
        return "training workers failed: " + "; ".join(f"rank {r}: {' '.join(c)}" for r, c in sorted(causes.items()))
    except TrainingFailedError as error:
        return "training could not start: " + str(error).strip().splitlines()[-1]
    return None


def _worker(config: Mapping[str, Any]) -> None:
    """One rank under Ray Train."""
    import ray
    import torch

    job: Job = config["job"]
    if config["gpus"] and not torch.cuda.is_available():
        refusal = (
            f"a GPU is reserved for each worker (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}), and PyTorch "
            f"{torch.__version__} finds none: install its CUDA build (make setup TORCH=cuda) and look at what make doctor says "
            f"of the driver, or set stages.{job.verb}.resources.gpus_per_worker=0 to train on processors"
        )
        rank.refuse(job, refusal)
        raise StageError(refusal)
    if os.environ.get("RANK", "0") == "0":
        (job.work / PLACED).write_text(ray.util.get_current_placement_group().id.hex())
    rank.train(job)
