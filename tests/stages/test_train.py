"""The train stage: inline and under Ray, resumed, refused, exported."""

import json
import os
import random
import signal
import time

import pytest

from stages.contract import ResourcesUnavailable, StageError
from stages.train import Launcher, train
from tests.stages import tiny_dataset as tiny
from tests.stages.training_jobs import config, job, losses, once_seen, two_processes


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.dataset(tmp_path_factory.mktemp("data"))[0]


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
