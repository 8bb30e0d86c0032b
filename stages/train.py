"""Trains a language model on packed sequences, from random weights or from a base checkpoint.

The loop is `stages.training.loop`, which knows no launcher. This file chooses where it runs (Ray Train workers, or this
process), watches `metrics.jsonl` while it does, and takes over the exported model. Ray's part:

    driver --(task)--> fit() --> controller --> one worker a rank, each calling `loop.run`

`fit()` runs in a task of its own: in a driver's main thread it would take Ctrl-C for itself, and what it started dies
with its process.
"""

import os
import re
import shutil
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from stages.artifacts import Checkpoint, TokenDataset
from stages.contract import Context, StageError, StageResources, stage
from stages.training.config import GOLDEN_PROMPTS, Job, ModelConfig, Recipe
from stages.training.preflight import require_cpus
from stages.training.report import Report

REFUSED, TRACES, PLACED = "refused.txt", "traces", "placement_group"
POLL_S = 0.25


class Launcher(Enum):
    """Who starts the training processes."""

    ray = "ray"
    inline = "inline"


@dataclass(kw_only=True)
class TrainResources(StageResources):
    """How training is computed; none of it changes the result beyond rounding."""

    launcher: Launcher = Launcher.ray
    """`ray`: Ray Train workers. `inline`: one process, this one; for debugging and comparison."""
    workers: int = 2
    """Data-parallel workers under `ray`, one process each; `inline` always has one."""
    cpus_per_worker: float = 1.0
    """Logical CPUs that Ray reserves for each worker."""
    threads_per_worker: int = 1
    """Threads of one worker's tensor operations (also OMP_NUM_THREADS)."""
    micro_batch_rows: int = 8
    """Packed rows in one forward pass of one worker; less needs less memory."""
    checkpoint_every: int = 100
    """Optimizer steps between resumable checkpoints in the work directory."""
    max_failures: int = 3
    """How often dead workers are replaced before the stage fails."""
    worker_start_timeout_s: int = 60
    """Seconds that workers may take to be placed."""
    collective_timeout_s: int = 120
    """Seconds that a worker may wait for the others before the attempt counts as failed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in asdict(self).items():
            if name not in ("launcher", "max_failures", "retries") and value <= 0:
                raise ValueError(f"resources.{name} must be above 0, got {value}")
        if self.max_failures < 0:
            raise ValueError(f"resources.max_failures must be 0 or more, got {self.max_failures}")

    def inline(self) -> bool:
        return self.launcher is Launcher.inline

    def cpus_wanted(self) -> float:
        return self.workers * self.cpus_per_worker if self.launcher is Launcher.ray else float(self.threads_per_worker)


@dataclass(kw_only=True)
class TrainConfig(Recipe):
    """Options in `conf/train/`; model shapes in `conf/model/`."""

    model: ModelConfig | None = None
    """Shape of a model that starts from random weights. Needed without a `base` input, refused with one."""
    golden_prompts: list[str] = field(default_factory=lambda: list(GOLDEN_PROMPTS))
    """Prompts whose greedy continuations are stored in the checkpoint: a server must repeat them before it takes traffic."""
    resources: TrainResources = field(default_factory=TrainResources)
    """How it is computed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.golden_prompts or not all(self.golden_prompts):
            raise ValueError(f"golden_prompts must be texts of at least one character, got {self.golden_prompts}")

    def check(self, connected: frozenset[str]) -> None:
        """Either a shape or a base, never both and never none."""
        if "base" in connected and self.model is not None:
            raise ValueError("model must be null when the base input is connected: the base brings its own shape")
        if "base" not in connected and self.model is None:
            raise ValueError("model must be set (for instance model=llama_1m) when no base input is connected")


@stage(libraries=("torch", "transformers", "tokenizers", "safetensors", "numpy"), ray=True)
def train(cfg: TrainConfig, ctx: Context, dataset: TokenDataset, base: Checkpoint | None = None) -> Checkpoint:
    """Packed sequences in, a checkpoint out. Resumes by itself from what an earlier attempt left in `ctx.work`."""
    cfg.check(frozenset({"base"} if base else ()))
    _require_same_tokenizer(dataset, base)
    _log_datasets(ctx, dataset)
    job = Job(
        recipe=Recipe(**{name: getattr(cfg, name) for name in Recipe.__dataclass_fields__}),
        model=cfg.model,
        base=base.local() if base else None,
        dataset=dataset.local(),
        work=ctx.work.resolve(),
        seed=ctx.seed,
        golden_prompts=tuple(cfg.golden_prompts),
        micro_batch_rows=cfg.resources.micro_batch_rows,
        checkpoint_every=cfg.resources.checkpoint_every,
        threads=cfg.resources.threads_per_worker,
    )
    (job.work / REFUSED).unlink(missing_ok=True)
    report = Report(ctx, job.work)
    if cfg.resources.launcher is Launcher.inline:
        from stages.training.loop import run

        run(job, report.poll)
    else:
        _under_ray(cfg.resources, ctx, job, report)
    report.finish()
    shutil.copytree(job.work / "export", ctx.output, dirs_exist_ok=True)
    made = Checkpoint(uri=ctx.output.resolve().as_uri())
    for source, drawn in made.summary().get("sources", {}).items():
        name = re.sub(r"[^\w./ -]", "_", source)  # what MLflow takes as the name of a metric
        ctx.tracker.log_metrics({f"{fact}_{name}": float(number) for fact, number in drawn.items()})
    return made


def _under_ray(resources: TrainResources, ctx: Context, job: Job, report: Report) -> None:
    import ray

    from stages.storage.node import facts, here

    require_cpus(
        workers=resources.workers,
        cpus=resources.cpus_per_worker,
        nodes=facts(),
        free=lambda: ray.available_resources().get("CPU", 0.0),
        fields=("stages.train.resources.workers", "stages.train.resources.cpus_per_worker"),
    )
    shutil.rmtree(job.work / TRACES, ignore_errors=True)
    (job.work / PLACED).unlink(missing_ok=True)
    ctx.progress(0.0, f"starting {resources.workers} workers")
    fit = ray.remote(num_cpus=0, max_retries=0, max_calls=1, scheduling_strategy=here())(_fit)
    outcome = fit.remote(job, resources, ctx.fingerprint)
    try:
        while not ray.wait([outcome], timeout=POLL_S)[0]:
            report.poll()
            if (job.work / REFUSED).exists():
                ray.wait([outcome], timeout=5.0)  # `fit()` is about to return
                raise StageError((job.work / REFUSED).read_text("utf-8"))
        error = ray.get(outcome)
    except BaseException as stopped:
        _take_down(outcome, job.work)
        if isinstance(stopped, SystemError) and stopped.__cause__ is not None:
            raise stopped.__cause__ from None  # what Ray's C code makes of a Ctrl-C that arrives inside its wait
        raise
    report.poll()
    if (job.work / REFUSED).exists():
        raise StageError((job.work / REFUSED).read_text("utf-8"))
    if error:
        raise StageError(f"{error}; the workers' tracebacks are in {job.work / TRACES}")


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
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback
    from ray.train.v2.api.config import LoggingConfig
    from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError

    from stages.storage.node import selector

    class NotAfterRefusal(WorkerGroupCallback):
        """Starts no workers for an error that would come again. They would also hold a placement group that the driver,
        which takes this process down, cannot know yet."""

        def before_worker_group_start(self, worker_group_context: Any) -> None:
            if (job.work / REFUSED).exists():
                raise StageError((job.work / REFUSED).read_text("utf-8"))

    class Trainer(TorchTrainer):
        """Without the detached cleaner: it asks a dashboard whether the controller lives, and without one stays for ever."""

        def _create_default_callbacks(self) -> list[Any]:
            kept = [c for c in super()._create_default_callbacks() if not isinstance(c, PlacementGroupCleanerCallback)]
            return [*kept, NotAfterRefusal()]

    trainer = Trainer(
        _worker,
        train_loop_config={"job": job},
        torch_config=TorchConfig(backend="gloo", timeout_s=resources.collective_timeout_s),
        scaling_config=ScalingConfig(
            num_workers=resources.workers,
            resources_per_worker={"CPU": resources.cpus_per_worker},
            label_selector=selector(),
        ),
        run_config=RunConfig(
            name=fingerprint,
            storage_path=str(job.work / "ray"),
            failure_config=FailureConfig(max_failures=resources.max_failures, controller_failure_limit=2),
            worker_runtime_env={"env_vars": _torchrun_environment(resources)},
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


def _torchrun_environment(resources: TrainResources) -> dict[str, str]:
    """What torchrun gives its workers and Ray Train does not."""
    return {"OMP_NUM_THREADS": str(resources.threads_per_worker), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def _worker(config: Mapping[str, Any]) -> None:
    """One rank under Ray Train. Only the death of a process is worth another try: any other error would come again, so it
    is left in a file that makes the driver stop at once."""
    import ray

    from stages.training.loop import run

    job: Job = config["job"]
    if os.environ.get("RANK", "0") == "0":
        (job.work / PLACED).write_text(ray.util.get_current_placement_group().id.hex())
    try:
        run(job)
    except Exception as error:
        rank = os.environ.get("RANK", "0")
        (job.work / TRACES).mkdir(parents=True, exist_ok=True)
        trace = job.work / TRACES / f"rank-{rank}-{time.time_ns()}.txt"
        trace.write_text(traceback.format_exc(), "utf-8")
        if isinstance(error, StageError):
            _refuse(job, str(error))
        elif not _lost_peer(error):
            _refuse(job, f"training worker {rank}: {type(error).__name__}: {error}; traceback in {trace}")
        raise


def _lost_peer(error: Exception) -> bool:
    import torch.distributed

    return (
        isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower() or "nccl" in str(error).lower()
    )


def _refuse(job: Job, message: str) -> None:
    temporary = job.work / f"{REFUSED}.{os.getpid()}"
    temporary.write_text(message, "utf-8")
    temporary.replace(job.work / REFUSED)


def _require_same_tokenizer(dataset: TokenDataset, base: Checkpoint | None) -> None:
    """A base model reads ids: with another tokenizer each would mean another text. Tokens that tokenize added are told."""
    if base is None:
        return
    from tokenizers import Tokenizer

    ours, theirs = dataset.local() / "tokenizer" / "tokenizer.json", base.local() / "tokenizer.json"
    if ours.read_bytes() == theirs.read_bytes():
        return
    new = dict(Tokenizer.from_file(str(ours)).get_vocab())
    old = Tokenizer.from_file(str(theirs)).get_vocab()
    same = all(new.pop(token, None) == number for token, number in old.items())
    if not same or len(new) != dataset.summary().get("added_tokens", 0):
        raise StageError(
            "the data set was tokenized with another tokenizer than the base model's; connect the base to the "
            "tokenize stage too"
        )


def _log_datasets(ctx: Context, dataset: TokenDataset) -> None:
    summary = dataset.summary()
    for split, purpose in (("train", "training"), ("validation", "validation")):
        profile = {name: float(number) for name, number in summary[split].items()}
        ctx.tracker.log_dataset(split, dataset, purpose, profile)
