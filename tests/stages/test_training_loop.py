"""The loop as a function: how the loss is normalised, ranks, resume, steps that are not finite."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from stages.contract import StageError
from stages.text.packed import PackedSplit
from stages.training import checkpoints
from stages.training.checkpoints import STATE
from stages.training.config import ModelConfig, Precision, Schedule
from stages.training.loop import Training, run
from stages.training.world import World
from tests.stages import tiny_dataset as tiny
from tests.stages.training_jobs import SHAPE, config, job, losses, two_processes


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny sums; more threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.dataset(tmp_path_factory.mktemp("data"))[0]


def alone_gradients(model, split: PackedSplit, rows) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of one mean over all predicted tokens, each document by itself and unpacked."""
    model.zero_grad()
    total, count = torch.zeros(()), 0
    for row in rows:
        starts = [*split.document_starts[row].tolist(), split.input_ids.shape[1]]
        for first, last in pairwise(starts):
            ids = torch.tensor(split.input_ids[row, first:last].astype(np.int64))
            labels = torch.tensor(split.labels[row, first:last].astype(np.int64))
            logits = model(input_ids=ids[None]).logits[0]
            total = total + torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
            count += int((labels[1:] != -100).sum())
    (total / count).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return total.item() / count, gradients


@pytest.mark.parametrize("micro_batch_rows", [1, 3, 8])
def test_accumulated_gradients_equal_one_mean_over_unpacked_documents(data, tmp_path, micro_batch_rows):
    cfg = config(resources={"micro_batch_rows": micro_batch_rows})
    training = Training(job(cfg, data, tmp_path), World(0, 1), lambda: None)
    training.resume()
    rows = np.arange(8)
    supervised = training.objective.supervised[rows]
    assert len(set(supervised.tolist())) > 1, "the rows must be uneven for this to prove anything"
    loss, wanted = alone_gradients(training.model, training.objective.split, rows)
    total = training._backward(rows, int(supervised.sum()))["loss"]
    assert total / supervised.sum() == pytest.approx(loss, abs=1e-6)
    difference = max(float((p.grad - w).abs().max()) for p, w in zip(training.model.parameters(), wanted, strict=True))
    assert difference < 1e-6


def one_document_a_row(split: PackedSplit) -> PackedSplit:
    """The first document of each row, the rest of the row padding: as `packing=none` lays them."""
    ends = np.array([starts[1] if len(starts) > 1 else tiny.LENGTH for starts in split.document_starts])
    beyond = np.arange(tiny.LENGTH) >= ends[:, None]
    starts = [np.array([0, end] if end < tiny.LENGTH else [0], np.int32) for end in ends]
    ids, labels = np.where(beyond, 0, split.input_ids), np.where(beyond, -100, split.labels)
    return PackedSplit(ids.astype(np.int32), labels.astype(np.int32), starts, split.sources)


@pytest.mark.parametrize("micro_batch_rows", [1, 3, 8])
def test_rows_of_one_document_are_computed_without_their_padding_and_without_a_mask(data, tmp_path, micro_batch_rows):
    cfg = config(resources={"micro_batch_rows": micro_batch_rows})
    training = Training(job(cfg, data, tmp_path), World(0, 1), lambda: None)
    training.resume()
    training.objective.split = split = one_document_a_row(training.objective.split)
    training.objective.lengths = split.lengths
    rows = np.arange(8)
    weight = int((split.labels[rows, 1:] != -100).sum())
    loss, wanted = alone_gradients(training.model, split, rows)
    batches = list(training._batches(rows))
    assert training._backward(rows, weight)["loss"] / weight == pytest.approx(loss, abs=1e-6)
    difference = max(float((p.grad - w).abs().max()) for p, w in zip(training.model.parameters(), wanted, strict=True))
    assert difference < 1e-6
    ordered = sorted(split.lengths[rows].tolist(), reverse=True)
    assert [tuple(micro["input_ids"].shape) for micro in batches] == [
        (len(ordered[first : first + micro_batch_rows]), ordered[first]) for first in range(0, 8, micro_batch_rows)
    ]
    assert all((micro["position_ids"].diff(dim=1) == 1).all() for micro in batches)


def test_ranks_have_rows_of_like_length_and_together_each_row_once(data, tmp_path):
    trainings = [Training(job(config(), data, tmp_path / str(r)), World(r, 2), lambda: None) for r in (0, 1)]
    rows = trainings[0].sampler.step(0)
    shares = [[micro["input_ids"] for micro in training._batches(rows)] for training in trainings]
    assert [[len(ids) for ids in share] for share in shares] == [[2, 1], [2, 1]]
    lengths = sorted(trainings[0].objective.lengths[rows].tolist(), reverse=True)
    assert [[ids.shape[1] for ids in share] for share in shares] == [[lengths[0], lengths[4]], [lengths[1], lengths[5]]]
    first = sorted(ids[:16].tolist() for share in shares for micro in share for ids in micro)
    assert first == sorted(trainings[0].objective.split.input_ids[row, :16].tolist() for row in rows)


@pytest.mark.slow
def test_two_ranks_train_what_one_process_trains(data, tmp_path):
    rows = len(PackedSplit.read(data.local(), "train"))
    uneven = config(tokens_per_step=7 * tiny.LENGTH)  # 7 rows: one rank has 4, the other 3
    starved = config(max_steps=None, epochs=(6 + 1) / rows)  # one row in the last step: one rank has none
    two_processes(job(uneven, data, tmp_path / "uneven-2"), job(starved, data, tmp_path / "starved-2"))
    for name, cfg, steps in (("uneven", uneven, 12), ("starved", starved, 2)):
        run(job(cfg, data, tmp_path / f"{name}-1"))
        two, one = losses(tmp_path / f"{name}-2"), losses(tmp_path / f"{name}-1")
        assert list(two) == list(one) == list(range(1, steps + 1))
        assert max(abs(two[step] - one[step]) for step in one) < 1e-5
        works = [tmp_path / f"{name}-{size}" for size in (1, 2)]
        ends = [[line for line in tiny.lines(work / "metrics.jsonl") if "step" in line][-1] for work in works]
        assert ends[0]["validation_loss"] == pytest.approx(ends[1]["validation_loss"], abs=1e-5)
        assert ends[0]["tokens"] == ends[1]["tokens"]


class Killed(Exception):
    """What ends a run in the middle."""


def run_until(given, step: int) -> None:
    def stop() -> None:
        if tiny.lines(given.work / "metrics.jsonl")[-1].get("step") == step:
            raise Killed

    with pytest.raises(Killed):
        run(given, stop)


def curve(work) -> dict[int, tuple[float, ...]]:
    """step -> what must not change by a bit; a step done twice must be equal both times."""
    seen: dict[int, tuple[float, ...]] = {}
    for line in tiny.lines(work / "metrics.jsonl"):
        if "step" in line:
            values = tuple(
                line.get(name) for name in ("loss", "grad_norm", "learning_rate", "tokens", "validation_loss")
            )
            assert seen.setdefault(line["step"], values) == values
    return seen


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    work = tmp_path_factory.mktemp("undisturbed")
    run(job(config(), data, work))
    return work


@pytest.mark.parametrize("step", [1, 6, 7, 12])
def test_a_run_that_was_cut_off_goes_on_bitwise(data, undisturbed, tmp_path, step):
    given = job(config(), data, tmp_path)
    run_until(given, step)
    run(given)
    assert curve(tmp_path) == curve(undisturbed)
    assert tiny.tree(tmp_path / "export") == tiny.tree(undisturbed / "export")


def halve(checkpoint):
    content = (checkpoint / STATE).read_bytes()
    (checkpoint / STATE).write_bytes(content[: len(content) // 2])


def flip(checkpoint):
    content = bytearray((checkpoint / STATE).read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / STATE).write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [
        halve,
        flip,
        lambda checkpoint: (checkpoint / STATE).write_bytes(b""),
        lambda checkpoint: (checkpoint / "complete.json").unlink(),
        lambda checkpoint: (checkpoint / "complete.json").write_text("{"),
    ],
    ids=["cut to half", "one bit", "empty", "no marker", "half a marker"],
)
def test_a_broken_newest_checkpoint_is_passed_over_and_named(data, undisturbed, tmp_path, spoil):
    given = job(config(), data, tmp_path)
    run_until(given, 10)
    assert sorted(c.name for c in (tmp_path / "checkpoints").iterdir()) == ["step-00000004", "step-00000008"]
    spoil(tmp_path / "checkpoints" / "step-00000008")
    run(given)
    events = [line["event"] for line in tiny.lines(tmp_path / "metrics.jsonl") if "event" in line]
    assert "step-00000008" in events[0] and "continuing from step-00000004" in events[0]
    assert events[1] == "resumed from step 4"
    assert curve(tmp_path) == curve(undisturbed)
    assert tiny.tree(tmp_path / "export") == tiny.tree(undisturbed / "export")


def test_an_attempt_that_ended_before_its_first_checkpoint_is_begun_again_and_says_so(data, undisturbed, tmp_path):
    given = job(config(), data, tmp_path)
    run_until(given, 2)
    assert not (tmp_path / "checkpoints").exists()
    run(given)
    events = [line["event"] for line in tiny.lines(tmp_path / "metrics.jsonl") if "event" in line]
    assert events == ["begins again at step 0: the attempt before left no checkpoint"]
    assert curve(tmp_path) == curve(undisturbed)


def test_no_more_than_two_checkpoints_stay(undisturbed):
    assert sorted(c.name for c in (undisturbed / "checkpoints").iterdir()) == ["step-00000008", "step-00000012"]


def test_bfloat16_products_train_nearly_the_same_float32_model(data, undisturbed, tmp_path):
    for name in ("first", "again"):
        run(job(config(precision=Precision.bfloat16), data, tmp_path / name))
    assert tiny.tree(tmp_path / "first" / "export") == tiny.tree(tmp_path / "again" / "export")
    half, full = losses(tmp_path / "first"), losses(undisturbed)
    assert 0 < max(abs(half[step] - full[step]) for step in full) < 0.02
    assert json.loads((tmp_path / "first" / "export" / "config.json").read_text())["dtype"] == "float32"


def test_another_seed_trains_another_model(data, undisturbed, tmp_path):
    run(job(config(), data, tmp_path, seed=1))
    weights = "export/model.safetensors"
    assert (tmp_path / weights).read_bytes() != (undisturbed / weights).read_bytes()


def test_steps_that_are_not_finite_stop_training_with_the_numbers(data, tmp_path):
    cfg = config(learning_rate=1e30, schedule=Schedule(warmup_ratio=0.0), max_nonfinite_steps=2)
    with pytest.raises(StageError, match=r"3 steps were not finite.*max_nonfinite_steps is 2; lower learning_rate"):
        run(job(cfg, data, tmp_path))
    lines = tiny.lines(tmp_path / "metrics.jsonl")
    assert lines[-1]["skipped"] == 3
    assert "NaN" not in json.dumps(lines)


def test_a_step_without_a_supervised_token_is_skipped(data, tmp_path):
    training = Training(job(config(), data, tmp_path), World(0, 1), lambda: None)
    training.resume()
    training.objective.supervised[:] = 0
    training.objective.split = replace(
        training.objective.split, labels=np.full_like(training.objective.split.labels, -100)
    )
    before = [p.detach().clone() for p in training.model.parameters()]
    training.step(0)
    assert training.skipped == 1
    assert all(torch.equal(p, b) for p, b in zip(training.model.parameters(), before, strict=True))


def test_validation_loss_does_not_depend_on_the_batch(data, tmp_path):
    values = []
    for size in (1, 5, 64):
        cfg = config(resources={"micro_batch_rows": size})
        training = Training(job(cfg, data, tmp_path / str(size)), World(0, 1), lambda: None)
        training.resume()
        values.append(training.objective.validate(training.world)["validation_loss"])
    assert max(values) - min(values) < 1e-6
    wanted, _ = alone_gradients(
        training.model, training.objective.validation, range(len(training.objective.validation))
    )
    assert values[0] == pytest.approx(wanted, abs=1e-6)
    assert values[0] == pytest.approx(np.log(257), abs=0.1), "random weights know nothing"


def test_sequences_longer_than_the_model_takes_are_refused(data, tmp_path):
    cfg = config(model=ModelConfig(**SHAPE, max_position_embeddings=32))
    with pytest.raises(StageError, match="sequences are 64 tokens long, the model takes 32"):
        run(job(cfg, data, tmp_path))


def test_a_checkpoint_that_was_just_written_stays_behind_a_later_one_that_is_broken(tmp_path):
    for step in (200, 300):
        checkpoints.save(tmp_path, step, {"step": step}, keep=2)
    (checkpoints.of_step(tmp_path, 300) / "complete.json").unlink()
    checkpoints.save(tmp_path, 250, {"step": 250}, keep=1)
    assert checkpoints.newest(tmp_path, lambda text: None) == checkpoints.of_step(tmp_path, 250)
