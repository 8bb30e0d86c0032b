"""The same training under torchrun's agent: the numbers of Ray Train, no process left behind, errors told at once."""

import _thread
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stages.contract import ResourcesUnavailable, StageError
from stages.launching import rank
from stages.train import train
from stages.training.config import ModelConfig
from stages.training.resources import Launcher, TrainResources
from tests.stages import tiny_dataset as tiny
from tests.stages.training_jobs import SHAPE, config, job, losses, once_seen, two_processes


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.dataset(tmp_path_factory.mktemp("data"))[0]


def pids(work: Path) -> list[int]:
    return [json.loads(file.read_text())["pid"] for file in sorted((work / "workers").glob("rank-*.json"))]


def gone(pid: int) -> bool:
    """Within seconds: ended, or a zombie that only waits to be read."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_it_needs_no_ray_and_counts_the_threads_of_its_workers():
    resources = TrainResources(launcher=Launcher.torchrun, workers=3, threads_per_worker=2, cpus_per_worker=9)
    assert resources.inline() and resources.cpus_wanted() == 6.0


def test_more_threads_than_the_machine_has_are_refused(make_context, data):
    here = len(os.sched_getaffinity(0))
    cfg = config(launcher=Launcher.torchrun, resources={"workers": here + 1})
    with pytest.raises(ResourcesUnavailable, match=f"set stages.train.resources.workers <= {here}"):
        train(cfg, make_context("train"), data)


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"model": ModelConfig(**SHAPE, max_position_embeddings=32)}, StageError, "the model takes 32"),
        (
            {"tokens_per_step": 10**8, "max_steps": 1, "resources": {"micro_batch_rows": 10**8}},
            ResourcesUnavailable,
            "lower resources.micro_batch_rows",
        ),
    ],
    ids=["data", "memory"],
)
def test_what_a_rank_refuses_is_what_the_driver_raises(data, tmp_path, given, kind, said):
    one = job(config(**given), data, tmp_path)
    rank.stop_if_refused(one)
    with pytest.raises(kind):
        rank.train(one)
    with pytest.raises(kind, match=said) as raised:
        rank.stop_if_refused(one)
    assert type(raised.value) is kind


@pytest.mark.ray
@pytest.mark.slow
def test_torchrun_and_ray_train_the_same_to_the_last_bit(make_context, data, ray_session):
    made = {}
    for launcher in (Launcher.torchrun, Launcher.ray):
        ctx = make_context("train")
        train(config(launcher=launcher), ctx, data).check()
        environment = json.loads(ctx.tracker.texts["environment.json"])
        assert [(w["rank"], w["world_size"], w["backend"]) for w in environment] == [(0, 2, "gloo"), (1, 2, "gloo")]
        assert all(w["variables"]["OMP_NUM_THREADS"] == "1" for w in environment)
        made[launcher] = losses(ctx.work), tiny.tree(ctx.output)
    assert list(made[Launcher.ray][0]) == list(range(1, 13))
    assert made[Launcher.torchrun] == made[Launcher.ray]


@pytest.mark.slow
@pytest.mark.faults
def test_a_killed_worker_is_replaced_and_changes_no_bit(make_context, data, tmp_path):
    cfg = config(launcher=Launcher.torchrun, max_steps=50, validate_every=0, resources={"checkpoint_every": 7})
    ctx = make_context("train")
    killer = once_seen(ctx.work, 20, lambda: os.kill(pids(ctx.work)[1], signal.SIGKILL))
    train(cfg, ctx, data)
    killer.join()
    assert "resumed from step " in ctx.tracker.texts["events.txt"]
    # Else a worker that is up early finds the dead ones' address in the store, and the restart fails one time in three.
    started = json.loads((ctx.work / "workers" / "rank-0.json").read_text())["variables"]
    assert started["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    two_processes(job(cfg, data, tmp_path / "plain"))
    assert losses(ctx.work) == losses(tmp_path / "plain")
    assert tiny.tree(ctx.output) == tiny.tree(tmp_path / "plain" / "export")


@pytest.mark.slow
@pytest.mark.faults
def test_ctrl_c_leaves_no_process(make_context, data):
    ctx = make_context("train")
    interrupter = once_seen(ctx.work, 3, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        train(config(launcher=Launcher.torchrun, max_steps=100_000, validate_every=0), ctx, data)
    interrupter.join()
    assert len(pids(ctx.work)) == 2 and all(gone(pid) for pid in pids(ctx.work))


@pytest.mark.slow
@pytest.mark.faults
def test_workers_do_not_outlive_a_killed_agent_and_the_stage_says_what_happened(make_context, data):
    ctx = make_context("train")
    ended = []

    def kill_the_agent() -> None:
        parent = int(Path(f"/proc/{pids(ctx.work)[0]}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent != os.getpid()
        os.kill(parent, signal.SIGKILL)
        ended.append(parent)

    killer = once_seen(ctx.work, 3, kill_the_agent)
    with pytest.raises(StageError, match="torchrun's agent ended with -9"):
        train(config(launcher=Launcher.torchrun, max_steps=100_000, validate_every=0), ctx, data)
    killer.join()
    assert ended and all(gone(pid) for pid in pids(ctx.work))


@pytest.mark.slow
@pytest.mark.faults
def test_a_worker_that_keeps_dying_ends_the_stage_with_its_rank_and_signal(make_context, data):
    ctx = make_context("train")
    killer = once_seen(ctx.work, 3, lambda: os.kill(pids(ctx.work)[1], signal.SIGKILL))
    cfg = config(launcher=Launcher.torchrun, max_steps=100_000, validate_every=0, resources={"max_failures": 0})
    with pytest.raises(StageError, match=r"training workers failed: .*rank 1: ended by SIGKILL"):
        train(cfg, ctx, data)
    killer.join()


@pytest.mark.slow
def test_an_error_in_a_worker_is_told_at_once_with_the_place_of_its_traceback(make_context, data, tmp_path):
    copy = tmp_path / "dataset"
    shutil.copytree(data.local(), copy)
    (copy / "train" / "part-00000.parquet").write_bytes(b"no parquet")
    with pytest.raises(StageError, match=r"training worker \d: ArrowInvalid: .*traceback in ") as error:
        train(config(launcher=Launcher.torchrun), make_context("train"), replace(data, uri=copy.as_uri()))
    assert "Traceback" in Path(str(error.value).split("traceback in ")[1]).read_text()
