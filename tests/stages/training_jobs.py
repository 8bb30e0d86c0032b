"""Training jobs on the tiny data set, and a plain launcher for two processes. Apart, because the tests of the loop and
those of the stage (which adds Ray) must run the very same work."""

import contextlib
import faulthandler
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import multiprocessing

from stages.artifacts import Checkpoint, TokenDataset
from stages.train import TrainConfig
from stages.training.config import Job, ModelConfig, TokenRecipe
from stages.training.follow import Follower
from stages.training.resources import Launcher, Sharding, TrainResources
from tests.stages import tiny_dataset as tiny

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def config(
    *, launcher: Launcher = Launcher.inline, resources: dict[str, Any] | None = None, **values: Any
) -> TrainConfig:
    """Twelve small steps, four to an epoch of the tiny data set."""
    values = {"max_steps": 12, "tokens_per_step": 6 * tiny.LENGTH, "validate_every": 5, "learning_rate": 3e-3} | values
    given = {"micro_batch_rows": 2, "checkpoint_every": 4} | (resources or {})
    model = values.pop("model", ModelConfig(**SHAPE))
    return TrainConfig(model=model, resources=TrainResources(launcher=launcher, **given), **values)


def job(cfg: TrainConfig, data: TokenDataset, work: Path, *, seed: int = 0, base: Checkpoint | None = None) -> Job:
    """The loop's view of a config."""
    recipe = TokenRecipe(**{name: getattr(cfg, name) for name in TokenRecipe.__dataclass_fields__})
    return Job(
        recipe=recipe,
        model=cfg.model,
        base=base.local() if base else None,
        base_digest=base.digest if base else "",
        dataset=data.local(),
        work=work,
        seed=seed,
        golden_prompts=tuple(cfg.golden_prompts),
        micro_batch_rows=cfg.resources.micro_batch_rows,
        checkpoint_every=cfg.resources.checkpoint_every,
        keep_checkpoints=cfg.resources.keep_checkpoints,
        gradient_checkpointing=cfg.resources.gradient_checkpointing,
        peak_tflops=cfg.resources.peak_tflops,
        threads=cfg.resources.threads_per_worker,
        sharded=cfg.resources.sharding is Sharding.full,
    )


def _rank(rank: int, size: int, given: list[tuple[Job, int]]) -> None:
    from stages.training.loop import run

    faulthandler.dump_traceback_later(240, exit=True)  # ranks that wait for each other say where, and end
    for one, port in given:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        run(one)


def two_processes(*given: Job) -> None:
    together(2, *given)


def together(size: int, *given: Job) -> None:
    """The loop under a plain launcher: what torchrun gives, without Ray. Several jobs share the seconds of the start."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in given]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        ports = [free.getsockname()[1] for free in sockets]
    work = list(zip(given, ports, strict=True))
    multiprocessing.start_processes(_rank, args=(size, work), nprocs=size, start_method="spawn")


def losses(work: Path) -> dict[int, float]:
    """step -> loss, from a run's own lines."""
    return {line["step"]: line["loss"] for line in tiny.lines(work / "metrics.jsonl") if "loss" in line}


def once_seen(work: Path, step: int, then: Callable[[], Any]) -> threading.Thread:
    """Calls `then` from a thread when `metrics.jsonl` has come to `step`."""

    def watch() -> None:
        follower, deadline = Follower(work / "metrics.jsonl"), time.monotonic() + 120
        while time.monotonic() < deadline:
            if any(line.get("step", 0) >= step for line in follower.poll()):
                then()
                return
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread
