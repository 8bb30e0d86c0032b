"""The train stage: inline and under Ray, resumed, refused, exported."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from stages.artifacts import Checkpoint
from stages.contract import ResourcesUnavailable, StageError
from stages.train import train
from stages.training.config import GOLDEN_PROMPTS
from stages.training.loop import run
from stages.training.resources import Launcher, TrainResources
from tests.stages import tiny_dataset as tiny
from tests.stages.training_jobs import config, job, losses, once_seen, two_processes

METRIC_NAMES = ("loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "skipped")


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


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A finished checkpoint of the tiny shape."""
    work = tmp_path_factory.mktemp("trained")
    run(job(config(), data, work))
    return Checkpoint(uri=(work / "export").as_uri(), digest="b" * 64)


def test_the_export_is_what_was_trained_and_repeats_its_golden_answers(trained, data):
    directory = trained.local()
    saved, config = (json.loads((directory / name).read_text()) for name in ("golden.json", "config.json"))
    assert config["dtype"] == "float32" and config["vocab_size"] == 257
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert [answer["prompt"] for answer in saved["answers"]] == list(GOLDEN_PROMPTS)
    for answer in saved["answers"]:
        assert tokenizer(answer["prompt"])["input_ids"] == answer["prompt_ids"]
        ids = torch.tensor([answer["prompt_ids"]])
        greedy = model.generate(ids, do_sample=False, max_new_tokens=16)[0, ids.shape[1] :].tolist()
        assert greedy == answer["greedy_ids"]
        top = torch.log_softmax(model(ids).logits[0, -1], dim=-1).topk(5)
        assert top.indices.tolist() == [entry["id"] for entry in answer["top_logprobs"]]
        assert top.values.tolist() == pytest.approx([entry["logprob"] for entry in answer["top_logprobs"]], abs=1e-4)


def test_no_file_of_the_export_names_a_place_or_a_time(trained, data):
    for name, content in tiny.tree(trained.local()).items():
        assert str(data.local().parent).encode() not in content, name
        assert b"/tmp" not in content and b"_name_or_path" not in content, name
    facts = trained.summary()
    assert facts["steps"] == 12 and facts["skipped_steps"] == 0 and facts["architecture"] == "LlamaForCausalLM"


def test_the_training_templates_and_tokenizer_leave_with_the_weights(data, tmp_path):
    copy = tmp_path / "dataset"
    shutil.copytree(data.local(), copy)
    (copy / "tokenizer" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    run(job(config(max_steps=1), replace(data, uri=copy.as_uri()), tmp_path / "work"))
    for file in (copy / "tokenizer").iterdir():
        assert (tmp_path / "work" / "export" / file.name).read_bytes() == file.read_bytes()


def test_a_base_saved_in_half_precision_with_contradicting_flags_is_trained_and_saved_in_float32(
    make_context, trained, data, tmp_path
):
    base = tmp_path / "base"
    shutil.copytree(trained.local(), base)
    transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    (base / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.7, "eos_token_id": 5}')
    ctx = make_context("train")
    train(config(model=None, max_steps=2), ctx, data, base=Checkpoint(uri=base.as_uri(), digest="e" * 64))
    generation = json.loads((ctx.output / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, 5], "it stops where its training documents end, and where the base did"
    assert "temperature" not in generation
    assert json.loads((ctx.output / "config.json").read_text())["dtype"] == "float32"
    first = losses(ctx.work)[1]
    assert first < 4.8, "it begins where the base ended, not at ln(257) = 5.5"


def test_a_base_with_another_tokenizer_is_refused(make_context, trained, data, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(trained.local(), base)
    vocabulary = json.loads((base / "tokenizer.json").read_text())
    swapped = {name: {1: 2, 2: 1}.get(index, index) for name, index in vocabulary["model"]["vocab"].items()}
    vocabulary["model"]["vocab"] = swapped
    (base / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(StageError, match="tokenized with another tokenizer"):
        train(config(model=None), make_context("train"), data, base=Checkpoint(uri=base.as_uri()))


def test_a_shape_and_a_base_exclude_each_other():
    with pytest.raises(ValueError, match="model must be null when the base input is connected"):
        config().check(frozenset({"dataset", "base"}))
    with pytest.raises(ValueError, match="model must be set"):
        config(model=None).check(frozenset({"dataset"}))


def test_golden_prompts_may_not_be_empty():
    with pytest.raises(ValueError, match="golden_prompts must be texts"):
        config(golden_prompts=["", "a"])


def test_resources_that_cannot_be_are_named():
    with pytest.raises(ValueError, match=r"resources.workers must be above 0, got 0"):
        TrainResources(workers=0)


def test_the_tracker_and_the_console_get_each_step_once_with_its_numbers(make_context, data):
    ctx, said = make_context("train"), []
    ctx = replace(
        ctx, progress=lambda fraction, text: said.append((fraction, text)), headline=lambda text: said.append(text)
    )
    train(config(), ctx, data)
    logged = {name: [(step, value) for n, value, step in ctx.tracker.metrics if n == name] for name in METRIC_NAMES}
    assert {name: len(values) for name, values in logged.items()} == {name: 12 for name in METRIC_NAMES}
    assert logged["loss"] == list(losses(ctx.work).items())
    assert [step for n, _, step in ctx.tracker.metrics if n == "validation_loss"] == [5, 10, 12]
    assert [(name, context) for name, _, context in ctx.tracker.datasets] == [
        ("train", "training"),
        ("validation", "validation"),
    ]
    headline = said.pop(-2)
    assert said.pop() == (1.0, "loading the export in a fresh process")
    assert [round(fraction * 12) for fraction, _ in said] == list(range(13))
    assert said[0][1].startswith("12 steps of 6 rows, 3 accumulated, warm-up 1 steps; about ")
    assert re.fullmatch(r"step 12/12 loss \d\.\d\d [\d.]+k? tok/s ETA 0 s", said[-1][1])
    assert re.fullmatch(r"validation loss \d\.\d{3} after 12 steps, [\d.]+k tokens", headline)


@pytest.mark.ray
@pytest.mark.slow  # the end-to-end test trains under Ray in the default run
def test_two_ray_workers_train_what_one_process_trains(make_context, data, ray_session):
    ctx, alone = make_context("train"), make_context("alone")
    train(config(launcher=Launcher.ray, max_steps=6), ctx, data).check()
    train(config(max_steps=6), alone, data)
    with_ray, inline = losses(ctx.work), losses(alone.work)
    assert list(with_ray) == list(inline) == list(range(1, 7))
    assert max(abs(with_ray[step] - inline[step]) for step in inline) < 1e-5
    assert [step for name, _, step in ctx.tracker.metrics if name == "loss"] == list(range(1, 7))
    environment = json.loads(ctx.tracker.texts["environment.json"])
    assert [(w["rank"], w["world_size"], w["torch_threads"]) for w in environment] == [(0, 2, 1), (1, 2, 1)]
    assert all(w["variables"]["OMP_NUM_THREADS"] == "1" for w in environment)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.faults
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
    undisturbed, disturbed = (
        [line for line in tiny.lines(work / "metrics.jsonl") if "step" in line or "event" in line]
        for work in (tmp_path / "plain", ctx.work)
    )
    assert len(disturbed) > len(undisturbed) == 50
    (again,) = [after["step"] - 1 for event, after in itertools.pairwise(disturbed) if "event" in event]
    assert ctx.tracker.texts["events.txt"] == (
        f"resumed from step {again}\n" if again else "begins again at step 0: the attempt before left no checkpoint\n"
    )
    assert again % 7 == 0
    wanted = {line["step"]: (line["loss"], line["grad_norm"], line["learning_rate"]) for line in undisturbed}
    for line in disturbed:
        if "step" in line:
            assert (line["loss"], line["grad_norm"], line["learning_rate"]) == wanted[line["step"]]
    assert [step for name, _, step in ctx.tracker.metrics if name == "loss"] == list(range(1, 51))
    assert tiny.tree(ctx.output) == tiny.tree(tmp_path / "plain" / "export")


@pytest.mark.ray
def test_more_workers_than_the_cluster_holds_are_refused_in_seconds(make_context, data, ray_session):
    start = time.monotonic()
    with pytest.raises(
        ResourcesUnavailable, match=r"needs 8 CPU, cluster has 4: set stages.train.resources.workers <= 4"
    ):
        train(config(launcher=Launcher.ray, resources={"workers": 8}), make_context("train"), data)
    assert time.monotonic() - start < 10


def assert_all_given_back():
    """No placement group is left, now or in the seconds in which workers would have been started once more."""
    import ray

    for _ in range(8):
        states = [group["state"] for group in ray.util.placement_group_table().values()]
        assert set(states) == {"REMOVED"}, "what it holds, the next attempt of the stage would lack"
        time.sleep(0.5)


@pytest.mark.ray
@pytest.mark.slow
def test_an_error_in_a_worker_stops_at_once_with_its_last_line_and_the_place_of_its_traceback(
    make_context, data, ray_session, tmp_path
):
    copy = tmp_path / "dataset"
    shutil.copytree(data.local(), copy)
    (copy / "train" / "part-00000.parquet").write_bytes(b"no parquet")
    ctx = make_context("train")
    with pytest.raises(
        StageError, match=r"training worker \d: ArrowInvalid: .*traceback in .*rank-\d-\d+\.txt"
    ) as error:
        train(config(launcher=Launcher.ray), ctx, replace(data, uri=copy.as_uri()))
    assert "Traceback" in Path(str(error.value).split("traceback in ")[1]).read_text()
    assert len(list((ctx.work / "traces").iterdir())) <= 2, "an error that would come again is not tried again"
    assert_all_given_back()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.faults
def test_a_worker_that_keeps_dying_ends_the_stage(make_context, data, ray_session):
    ctx = make_context("train")
    rank_1 = ctx.work / "workers" / "rank-1.json"
    killer = once_seen(ctx.work, 3, lambda: os.kill(json.loads(rank_1.read_text())["pid"], signal.SIGKILL))
    with pytest.raises(StageError, match=r"training workers failed.*rank 1"):
        train(config(launcher=Launcher.ray, max_steps=400, resources={"max_failures": 0}), ctx, data)
    killer.join()
