"""GPUs under Ray: what is reserved for a worker, on a real Ray that was told of GPUs which are not there, and what a worker says
that finds none."""

import json
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from stages.contract import ResourcesUnavailable, StageError
from stages.train import train
from stages.training import outlook, resources
from stages.training.resources import Launcher, Sharding, TrainResources
from tests.stages import tiny_dataset as tiny
from tests.stages.training_jobs import config

SPLIT = {"sharding": Sharding.full}


def test_more_or_less_than_one_gpu_a_worker_is_refused():
    for count in (2, -1):
        with pytest.raises(
            ValueError, match=rf"resources.gpus_per_worker must be 0 or 1, got {count}.*set resources.workers"
        ):
            TrainResources(gpus_per_worker=count)


@pytest.mark.parametrize(
    ("asked", "there", "built", "each", "workers"),
    [
        ({}, 0, True, 0, 2),
        ({}, 4, False, 0, 2),
        ({}, 4, True, 1, 2),
        ({}, 1, True, 1, 1),
        ({"workers": 8}, 4, True, 1, 4),
        ({"workers": 8} | SPLIT, 4, True, 1, 8),
        ({"gpus_per_worker": 0}, 4, True, 0, 2),
        ({"gpus_per_worker": 1}, 0, False, 1, 2),
    ],
)
def test_a_worker_has_a_gpu_where_there_is_one_and_torch_can_use_it(asked, there, built, each, workers, monkeypatch):
    monkeypatch.setattr(resources, "torch_knows_gpus", lambda: built)
    placed = TrainResources(**asked).placed(float(there))
    assert (placed.gpus_per_worker, placed.workers) == (each, workers)


def test_a_plan_knows_which_device_will_compute(monkeypatch):
    for module in (outlook, resources):
        monkeypatch.setattr(module, "torch_knows_gpus", lambda: True)
    monkeypatch.setattr(outlook, "_has_gpu", lambda: True)
    assert all(outlook.on_gpu(TrainResources(launcher=launcher)) for launcher in Launcher)
    assert not outlook.on_gpu(TrainResources(gpus_per_worker=0))
    assert outlook.on_gpu(TrainResources(launcher=Launcher.torchrun, gpus_per_worker=0)), "it reserves and hides none"
    monkeypatch.setattr(outlook, "_has_gpu", lambda: False)
    assert not any(outlook.on_gpu(TrainResources(launcher=launcher)) for launcher in Launcher)


@pytest.mark.ray
def test_a_gpu_that_the_cluster_has_not_is_refused_in_seconds(make_context, ray_session, tmp_path):
    data = tiny.dataset(tmp_path)[0]
    with pytest.raises(
        ResourcesUnavailable, match=r"needs 1 GPU, cluster has 0: set stages.train.resources.gpus_per_worker <= 0"
    ):
        train(config(launcher=Launcher.ray, resources={"gpus_per_worker": 1}), make_context("train"), data)


def _with_two_gpus(given: list[dict[str, Any]], place: Path, answers: Connection) -> None:
    """In a process of its own, on a Ray that was told of two GPUs: what came of each training, in turn."""
    import ray

    from benchmarks import bare

    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=2,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
    )
    data = tiny.dataset(place / "data")[0]
    for number, one in enumerate(given):
        work, output = place / f"work-{number}", place / f"output-{number}"
        work.mkdir()
        output.mkdir()
        try:
            train(
                config(launcher=Launcher.ray, max_steps=2, resources=one),
                bare.context(output, work, f"{number:064x}"),
                data,
            )
        except StageError as error:
            answers.send(f"{type(error).__name__}: {error}")
            continue
        ranks = sorted((work / "workers").glob("rank-*.json"))
        answers.send([json.loads(rank.read_text())["variables"].get("CUDA_VISIBLE_DEVICES") for rank in ranks])
    ray.shutdown()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(resources.torch_knows_gpus(), reason="this PyTorch would look for the GPUs")
def test_workers_reserve_the_gpus_that_ray_knows_of_and_train_on_none_that_is_not_there(tmp_path):
    context = multiprocessing.get_context("spawn")
    answers, theirs = context.Pipe(duplex=False)
    given: list[dict[str, Any]] = [{}, {"gpus_per_worker": 1}, {"gpus_per_worker": 1, "workers": 3}]
    child = context.Process(target=_with_two_gpus, args=(given, tmp_path, theirs))
    child.start()
    theirs.close()
    try:
        found = []
        for _ in given:
            assert answers.poll(120)
            found.append(answers.recv())
        child.join(30)
    finally:
        child.kill()
        child.join()
    trained, refused, too_few = found
    assert trained == ["", ""], "built for processors: it trains on them, and sees no GPU that it has not reserved"
    assert refused.startswith("StageError: a GPU is reserved for each worker (CUDA_VISIBLE_DEVICES=0,1), and PyTorch ")
    assert "set stages.train.resources.gpus_per_worker=0 to train on processors" in refused
    assert too_few == "ResourcesUnavailable: needs 3 GPU, cluster has 2: set stages.train.resources.workers <= 2"
