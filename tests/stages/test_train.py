"""The train stage: inline and under Ray, resumed, refused, exported."""

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import multiprocessing

from stages.contract import ResourcesUnavailable
from stages.train import Launcher, TrainConfig, TrainResources, train
from stages.training.config import Job, ModelConfig, Recipe
from stages.training.follow import Follower
from tests.stages import tiny_dataset as tiny

SHAPE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)


def config(*, launcher: Launcher = Launcher.inline, resources: dict | None = None, **values) -> TrainConfig:
    values = {"max_steps": 12, "tokens_per_step": 6 * tiny.LENGTH, "validate_every": 5, "learning_rate": 3e-3} | values
    given = {"micro_batch_rows": 2, "checkpoint_every": 4} | (resources or {})
    model = values.pop("model", ModelConfig(**SHAPE))
    return TrainConfig(model=model, resources=TrainResources(launcher=launcher, **given), **values)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.dataset(tmp_path_factory.mktemp("data"))[0]


def losses(work: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in tiny.lines(work / "metrics.jsonl") if "loss" in line}


def test_two_executions_give_the_same_bytes_and_the_loss_falls(make_context, data):
    trees = []
    for _ in range(2):
        ctx = make_context("train")
        checkpoint = train(config(), ctx, data)
        checkpoint.check()
        trees.append(tiny.tree(ctx.output))
    assert trees[0] == trees[1]
    curve = losses(ctx.work)
    assert list(curve) == list(range(1, 13))
    assert curve[12] < curve[1] - 0.5


def _rank(rank: int, job: Job, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from stages.training.loop import run

    run(job)


def two_processes(job: Job) -> None:
    """The loop under a plain launcher: what torchrun gives, without Ray."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.start_processes(_rank, args=(job, port), nprocs=2, start_method="spawn")


def job(cfg: TrainConfig, data, work: Path, seed: int = 0) -> Job:
    recipe = Recipe(**{name: getattr(cfg, name) for name in Recipe.__dataclass_fields__})
    return Job(
        recipe=recipe,
        model=cfg.model,
        base=None,
        dataset=data.local(),
        work=work,
        seed=seed,
        golden_prompts=tuple(cfg.golden_prompts),
        micro_batch_rows=cfg.resources.micro_batch_rows,
        checkpoint_every=cfg.resources.checkpoint_every,
        threads=cfg.resources.threads_per_worker,
    )


def once_seen(work: Path, step: int, then: Callable[[], None]) -> threading.Thread:
    """Calls `then` from a thread when `metrics.jsonl` has come to `step`."""

    def watch() -> None:
        follower, deadline = Follower(work / "metrics.jsonl"), time.monotonic() + 120
        while time.monotonic() < deadline:
            if any(line.get("step", 0) >= step for line in follower.poll()):
                return then()
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.ray
def test_a_killed_worker_changes_no_bit_of_losses_and_weights(make_context, data, ray_session, tmp_path):
    seed = int(time.time())
    step = random.Random(seed).randint(2, 45)
    print(f"rank 1 dies at step {step} (seed {seed})")
    values = {"max_steps": 50, "validate_every": 0}
    ctx = make_context("train")
    rank_1 = ctx.work / "workers" / "rank-1.json"
    killer = once_seen(ctx.work, step, lambda: os.kill(json.loads(rank_1.read_text())["pid"], signal.SIGKILL))
    resources = {"checkpoint_every": 7}
    train(config(launcher=Launcher.ray, resources=resources, **values), ctx, data)
    killer.join()
    two_processes(job(config(resources=resources, **values), data, tmp_path / "plain"))
    events = ctx.tracker.texts["events.txt"]
    undisturbed, disturbed = tiny.lines(tmp_path / "plain" / "metrics.jsonl"), tiny.lines(ctx.work / "metrics.jsonl")
    print(events, len(disturbed))
    assert len(disturbed) > len(undisturbed) == 50
    wanted = {line["step"]: (line["loss"], line["grad_norm"], line["learning_rate"]) for line in undisturbed}
    for line in disturbed:
        if "step" in line:
            assert (line["loss"], line["grad_norm"], line["learning_rate"]) == wanted[line["step"]]
    assert [step for name, _, step in ctx.tracker.metrics if name == "loss"] == list(range(1, 51))
    assert tiny.tree(ctx.output) == tiny.tree(tmp_path / "plain" / "export")
    (environment,) = [json.loads(t) for p, t in ctx.tracker.texts.items() if p == "environment.json"]
    assert [(w["rank"], w["world_size"], w["torch_threads"]) for w in environment] == [(0, 2, 1), (1, 2, 1)]
    assert all(w["variables"]["OMP_NUM_THREADS"] == "1" for w in environment)


def living_actors() -> list[str]:
    import ray

    ours = [a for a in ray._private.state.actors().values() if a["ActorClassName"] != "_AutoscalingCoordinatorActor"]
    return [actor["ActorClassName"] for actor in ours if actor["State"] != "DEAD"]  # that one is the cluster's own


@pytest.mark.ray
@pytest.mark.slow
def test_ctrl_c_takes_down_workers_and_placement_groups(make_context, data, ray_session):
    import psutil
    import ray

    ctx = make_context("train")
    pressed = []
    once_seen(ctx.work, 3, lambda: (pressed.append(time.monotonic()), os.kill(os.getpid(), signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        train(config(launcher=Launcher.ray, max_steps=100_000), ctx, data)
    print("seconds from Ctrl-C to the return", time.monotonic() - pressed[0])
    pids = [json.loads((ctx.work / "workers" / f"rank-{r}.json").read_text())["pid"] for r in (0, 1)]
    while time.monotonic() < pressed[0] + 15 and (
        any(map(psutil.pid_exists, pids))
        or {g["state"] for g in ray.util.placement_group_table().values()} - {"REMOVED"}
        or ray.available_resources()["CPU"] < 4
        or living_actors()
    ):
        time.sleep(0.1)
    print("seconds from Ctrl-C to nothing left", time.monotonic() - pressed[0])
    assert not any(map(psutil.pid_exists, pids))
    assert {g["state"] for g in ray.util.placement_group_table().values()} <= {"REMOVED"}
    assert ray.available_resources()["CPU"] == 4
    assert not living_actors()


@pytest.mark.ray
def test_more_workers_than_the_cluster_holds_are_refused_in_seconds(make_context, data, ray_session):
    start = time.monotonic()
    with pytest.raises(
        ResourcesUnavailable, match=r"needs 8 CPU, cluster has 4: set stages.train.resources.workers <= 4"
    ):
        train(config(launcher=Launcher.ray, resources={"workers": 8}), make_context("train"), data)
    assert time.monotonic() - start < 10
