"""The train stage: inline and under Ray, resumed, refused, exported."""

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import tiny

from stages.contract import ResourcesUnavailable, StageError
from stages.train import Launcher, TrainConfig, TrainResources, train
from stages.training.config import ModelConfig

SHAPE = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
)


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
