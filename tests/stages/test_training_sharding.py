"""A model that is split over two processes (FSDP2, gloo): the same losses and the same export as a whole one."""

import json
import shutil

import pytest
import safetensors.torch
import torch

from stages.artifacts import Checkpoint
from stages.contract import StageError
from stages.training.config import Adapter, Algorithm, Optimizer, Weights
from stages.training.loop import run
from stages.training.reloaded import require_equal
from stages.training.resources import Launcher, Sharding, TrainResources
from stages.training.sharding import require
from tests.stages import tiny_dataset as tiny
from tests.stages.training_jobs import config, job, losses, together, two_processes


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.dataset(tmp_path_factory.mktemp("data"))[0]


def split(**values):
    """Twelve steps of five rows, so that one process has two micro-batches where the other has one."""
    given = {"tokens_per_step": 5 * tiny.LENGTH, "resources": {"sharding": Sharding.full}} | values
    return config(launcher=Launcher.torchrun, **given)


def whole(**values):
    return config(tokens_per_step=5 * tiny.LENGTH, **values)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """(split, whole): where each was trained."""
    places = [tmp_path_factory.mktemp(name) for name in ("split", "whole")]
    run(job(whole(), data, places[1]))
    two_processes(job(split(), data, places[0]))
    return places


def tensors(work):
    return safetensors.torch.load_file(work / "export" / "model.safetensors")


@pytest.mark.slow
def test_a_split_model_takes_the_steps_of_a_whole_one_and_leaves_whole(trained):
    one, other = losses(trained[0]), losses(trained[1])
    assert list(one) == list(other) == list(range(1, 13))
    assert max(abs(one[step] - other[step]) for step in one) < 1e-5
    ours, theirs = tensors(trained[0]), tensors(trained[1])
    assert ours.keys() == theirs.keys() and "lm_head.weight" not in ours, "embedding and head are one matrix"
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-4
    require_equal(trained[0] / "export", trained[0] / "expected")
    norms = [
        {line["step"]: line["grad_norm"] for line in tiny.lines(work / "metrics.jsonl") if "grad_norm" in line}
        for work in trained[:2]
    ]
    assert max(abs(norms[0][step] - norms[1][step]) for step in norms[0]) < 1e-4


@pytest.mark.slow
def test_a_checkpoint_holds_a_part_of_each_worker_and_is_read_by_as_many_or_by_more(trained, data, tmp_path):
    checkpoint = trained[0] / "checkpoints" / "step-00000008"
    files = json.loads((checkpoint / "complete.json").read_text())["files"]
    assert {"shards/__0_0.distcp", "shards/__1_0.distcp"} <= files.keys()
    for size in (2, 3):
        work = tmp_path / str(size)
        shutil.copytree(checkpoint, work / "checkpoints" / checkpoint.name)
        together(size, job(split(), data, work))
        again, undisturbed = losses(work), losses(trained[0])
        assert list(again) == [9, 10, 11, 12]
        if size == 2:
            assert again == {step: undisturbed[step] for step in again}, "to the last bit"
            assert tiny.tree(work / "export") == tiny.tree(trained[0] / "export")
        assert max(abs(again[step] - undisturbed[step]) for step in again) < 1e-5


@pytest.mark.slow
def test_a_part_that_is_broken_is_passed_over(trained, data, tmp_path):
    shutil.copytree(trained[0] / "checkpoints", tmp_path / "checkpoints")
    broken = tmp_path / "checkpoints" / "step-00000012" / "shards" / "__1_0.distcp"
    broken.write_bytes(broken.read_bytes()[:-1])
    two_processes(job(split(), data, tmp_path))
    events = [line["event"] for line in tiny.lines(tmp_path / "metrics.jsonl") if "event" in line]
    assert "step-00000012 (shards/__1_0.distcp has" in events[0] and "continuing from step-00000008" in events[0]


@pytest.mark.slow
def test_what_was_written_whole_is_not_read_split_nor_the_other_way_round(trained, data, tmp_path):
    for source, cfg, word in ((trained[0], whole(), "full"), (trained[1], split(), "none")):
        work = tmp_path / word
        shutil.copytree(source / "checkpoints", work / "checkpoints")
        with pytest.raises(
            (StageError, torch.multiprocessing.ProcessRaisedException), match=f"sharding={word}; set it so"
        ):
            two_processes(job(cfg, data, work)) if word == "none" else run(job(cfg, data, work))


@pytest.mark.slow
def test_an_adapter_and_the_best_weights_leave_a_split_model(trained, data, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(trained[1] / "export", base)
    start = Checkpoint(uri=base.as_uri(), digest="b" * 64)
    values = {"model": None, "adapter": Adapter(r=2), "validate_every": 3, "export": Weights.best}
    two_processes(job(split(**values), data, tmp_path / "split", base=start))
    run(job(whole(**values), data, tmp_path / "whole", base=start))
    ours, theirs = tensors(tmp_path / "split"), tensors(tmp_path / "whole")
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-4
    require_equal(tmp_path / "split" / "export", tmp_path / "split" / "expected")


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match="sharding must be none with one worker"):
        TrainResources(launcher=Launcher.inline, sharding=Sharding.full)
    with pytest.raises(StageError, match="adafactor keeps rows and columns"):
        require(split(optimizer=Optimizer(name=Algorithm.adafactor)))
