"""The loop's promises with everything switched on: early stopping, best weights, layers computed again, other worker counts,
and the same losses as the library that most people train with."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from stages.artifacts import Checkpoint
from stages.contract import ResourcesUnavailable, StageError
from stages.text.packed import positions
from stages.training import checkpoints, estimate, probes, recompute
from stages.training import model as models
from stages.training.config import Algorithm, EarlyStopping, ModelConfig, Optimizer, Precision, Schedule, Shape, Weights
from stages.training.loop import Training, run
from stages.training.model import require_isolation
from stages.training.stopping import Best
from stages.training.world import World
from tests.stages import tiny_dataset as tiny
from tests.stages.test_training_loop import curve, one_thread, run_until  # noqa: F401
from tests.stages.training_jobs import SHAPE, config, job, losses, two_processes

EVERYTHING = {
    "schedule": Schedule(shape=Shape.wsd, warmup_ratio=0.2, decay_ratio=0.3),
    "early_stopping": EarlyStopping(patience=2, min_delta=10.0),  # nothing is ever better than the first by so much
    "export": Weights.best,
    "validate_every": 3,
    "precision": Precision.bfloat16,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.dataset(tmp_path_factory.mktemp("data"))[0]


def with_everything(data, work, name=Algorithm.adamw):
    cfg = config(**EVERYTHING, optimizer=Optimizer(name=name), resources={"gradient_checkpointing": True})
    return job(cfg, data, work)


def exported(work) -> dict[str, object]:
    return Checkpoint(uri=(work / "export").as_uri()).summary()


@pytest.mark.parametrize("name", [pytest.param(Algorithm.adamw, marks=pytest.mark.slow), Algorithm.adafactor])
def test_a_run_that_was_cut_off_in_its_second_epoch_goes_on_bitwise_with_everything_on(data, tmp_path, name):
    undisturbed, cut = (with_everything(data, tmp_path / place, name) for place in ("undisturbed", "cut"))
    run(undisturbed)
    run_until(cut, 7)
    run(cut)
    assert max(curve(cut.work)) == 9, "stopped early"
    assert curve(cut.work) == curve(undisturbed.work)
    assert tiny.tree(cut.work / "export") == tiny.tree(undisturbed.work / "export")
    run(cut)  # once more after its end: nothing is trained
    assert max(curve(cut.work)) == 9
    assert tiny.tree(cut.work / "export") == tiny.tree(undisturbed.work / "export")


def test_training_stops_when_validation_brings_nothing_better_and_the_best_weights_leave(data, tmp_path):
    given = with_everything(data, tmp_path)
    run(given)
    lines = tiny.lines(tmp_path / "metrics.jsonl")
    steps = {line["step"]: line for line in lines if "step" in line}
    assert list(steps) == list(range(1, 10)), "validated at 3, 6 and 9; two in a row brought nothing"
    assert [step for step, line in steps.items() if "validation_loss" in line] == [3, 6, 9]
    assert steps[9]["best_step"] == 3 and steps[9]["best_validation_loss"] == steps[3]["validation_loss"]
    assert any("stopped early at step 9" in line.get("event", "") for line in lines)
    summary = exported(tmp_path)
    assert summary["steps"] == 3 and summary["validation_loss"] == steps[3]["validation_loss"]
    kept = checkpoints.load(checkpoints.of_step(tmp_path / "checkpoints", 3))["model"]
    left = models.load(tmp_path / "export").state_dict()
    assert all(torch.equal(left[name], tensor) for name, tensor in kept.items())


def test_the_best_checkpoint_stays_beside_the_newest_ones(data, tmp_path):
    cfg = config(**EVERYTHING, resources={"checkpoint_every": 1, "keep_checkpoints": 1})
    run(job(cfg, data, tmp_path))
    assert sorted(c.name for c in (tmp_path / "checkpoints").iterdir()) == ["step-00000003", "step-00000009"]


def test_without_its_checkpoint_a_best_loss_is_forgotten_and_found_again(data, tmp_path):
    given = with_everything(data, tmp_path)
    run_until(given, 5)
    (tmp_path / "checkpoints" / "step-00000003" / "state.pt").unlink()
    run(given)
    events = [line["event"] for line in tiny.lines(tmp_path / "metrics.jsonl") if "event" in line]
    assert any("best weights (step 3) are not whole" in event for event in events)
    assert exported(tmp_path)["steps"] == 6


@pytest.mark.parametrize("precision", Precision)
def test_layers_that_are_computed_again_give_the_same_bits(data, tmp_path, precision):
    for again in (False, True):
        cfg = config(precision=precision, max_steps=4, resources={"gradient_checkpointing": again})
        run(job(cfg, data, tmp_path / str(again)))
    assert tiny.tree(tmp_path / "True" / "export") == tiny.tree(tmp_path / "False" / "export")
    assert curve(tmp_path / "True") == curve(tmp_path / "False")


def test_a_model_that_leaks_only_when_its_layers_are_computed_again_is_refused():
    class Leaky(transformers.LlamaForCausalLM):
        def forward(self, *, position_ids=None, **kwargs):
            again = self.model.layers[0].gradient_checkpointing and torch.is_grad_enabled()
            plain = torch.arange(position_ids.shape[1])[None] if again else position_ids
            return super().forward(position_ids=plain, **kwargs)

    leaky = Leaky(models.build(ModelConfig(**SHAPE), vocab_size=257, eos_token_id=0, seed=0).config)
    require_isolation(leaky, 257)
    with pytest.raises(StageError, match="packed documents see each other"):
        recompute.enable(leaky)


def test_a_model_that_cannot_compute_its_layers_again_is_refused():
    with pytest.raises(
        StageError, match=r"Linear cannot compute its layers again; set resources\.gradient_checkpointing"
    ):
        recompute.enable(torch.nn.Linear(1, 1))


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_workers_as_if_nothing_had_happened(data, tmp_path):
    cfg = config(
        schedule=Schedule(shape=Shape.linear),
        validate_every=3,
        export=Weights.best,
        resources={"keep_checkpoints": 9, "gradient_checkpointing": True},
    )
    alone, fewer, more = (job(cfg, data, tmp_path / name) for name in ("alone", "fewer", "more"))
    run(alone)
    run_until(more, 7)
    two_processes(more, fewer)
    for checkpoint in sorted((fewer.work / "checkpoints").iterdir()):
        if checkpoint.name > "step-00000006":
            for file in checkpoint.iterdir():
                file.unlink()
    (fewer.work / "metrics.jsonl").unlink()
    run(fewer)
    wanted = losses(alone.work)
    for work, first in ((more.work, 1), (fewer.work, 7)):
        found = losses(work)
        assert list(found)[-1] == 12 and min(found) == first
        assert max(abs(found[step] - wanted[step]) for step in found) < 1e-5
        ends = [tiny.lines(place / "metrics.jsonl")[-2] for place in (work, alone.work)]
        assert ends[0]["tokens"] == ends[1]["tokens"] and ends[0]["step"] == 12
        assert ends[0]["validation_loss"] == pytest.approx(ends[1]["validation_loss"], abs=1e-5)


class InOrder(transformers.Trainer):
    """The library's trainer, on rows in the order that our sampler gives."""

    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, model, inputs, *given, **values):
        loss = super().compute_loss(model, inputs, *given, **values)
        self.seen.append(float(loss.detach()))
        return loss


def test_the_first_twenty_losses_are_those_of_transformers_trainer(data, tmp_path):
    cfg = config(
        max_steps=20,
        learning_rate=3e-3,
        schedule=Schedule(shape=Shape.constant, warmup_ratio=0.0),
        optimizer=Optimizer(weight_decay=0.0, beta1=0.9, beta2=0.95),
        validate_every=0,
    )
    given = job(cfg, data, tmp_path / "ours")
    run(given)
    training = Training(replace(given, work=tmp_path / "again"), World(0, 1), lambda: None)
    rows = np.concatenate([training.sampler.step(step) for step in range(20)])
    split = training.objective.split
    # Whole rows, padding and all: the library shifts labels itself, and we leave away what pads all rows of a batch.
    items = []
    for row in rows:
        places = positions(split.document_starts[row], tiny.LENGTH)
        one = {"input_ids": split.input_ids[row], "labels": split.labels[row], "position_ids": places}
        items.append({name: torch.from_numpy(values.astype(np.int64)) for name, values in one.items()})
    assert (split.lengths[rows] < tiny.LENGTH).any()
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path / "theirs"),
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        max_steps=20,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = InOrder(model=training.model, args=settings, train_dataset=items)
    trainer.seen = []
    trainer.train()
    # Each is a micro-batch's part of the mean over the tokens of its step.
    theirs = np.array(trainer.seen).reshape(20, 3).sum(axis=1)
    ours = np.array([losses(tmp_path / "ours")[step] for step in range(1, 21)])
    assert np.abs(ours - theirs).max() < 1e-4
    assert theirs[0] - theirs[-1] > 0.5, "there must be something to agree on"


def test_bfloat16_products_leave_weights_and_moments_float32_so_that_small_steps_count(data, tmp_path):
    assert torch.tensor(1.0, dtype=torch.bfloat16) + 1e-3 == 1.0, "what a bfloat16 weight would make of the step"
    cfg = config(
        precision=Precision.bfloat16, learning_rate=1e-3, schedule=Schedule(shape=Shape.constant, warmup_ratio=0)
    )
    training = Training(job(cfg, data, tmp_path), World(0, 1), lambda: None)
    training.resume()
    training.step(0)
    moved = training.model.model.norm.weight.detach() - 1
    assert 0 < float(moved.abs().max()) < 2**-8
    kept = [t for state in training.optimizer.state.values() for t in state.values()]
    assert {t.dtype for t in (*training.model.parameters(), *kept)} == {torch.float32}


@pytest.mark.parametrize(
    ("value", "reason"), [(math.nan, "is nan before any weight has changed"), (0.0, "is exactly 0")]
)
def test_a_first_loss_that_is_no_number_to_go_down_from_stops_at_once(data, tmp_path, value, reason):
    class Broken(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, input_ids, **_):
            return self.model.lm_head.weight.sum() * 0 + value

    training = Training(job(config(), data, tmp_path), World(0, 1), lambda: None)
    training.objective.module = Broken(training.model)
    training.resume()
    with pytest.raises(StageError, match=reason):
        training.step(0)


def test_a_data_set_without_a_supervised_token_is_refused_before_the_first_step():
    with pytest.raises(StageError, match="no token of the training split is supervised"):
        probes.require_something_to_learn(0)


def test_random_weights_guess_and_what_does_not_is_warned_of(data, tmp_path):
    run(job(config(max_steps=1), data, tmp_path / "small"))
    assert losses(tmp_path / "small")[1] == pytest.approx(math.log(257), abs=0.1)
    assert not [line for line in tiny.lines(tmp_path / "small" / "metrics.jsonl") if "event" in line]
    wide = ModelConfig(**SHAPE, initializer_range=1.0)
    assert probes.unexpected(models.build(wide, vocab_size=257, eos_token_id=0, seed=0), math.log(257) + 40)
    usual = models.build(ModelConfig(**SHAPE), vocab_size=257, eos_token_id=0, seed=0)
    assert probes.unexpected(usual, math.log(257)) is None
    assert "guess with 5.56 (ln of 257 tokens): labels may be shifted" in probes.unexpected(usual, 3.0)


def test_a_run_that_cannot_fit_is_refused_before_its_first_step(data, tmp_path, monkeypatch):
    monkeypatch.setattr(estimate, "PROCESS_BYTES", 1 << 50)
    with pytest.raises(ResourcesUnavailable, match="training needs about 1125899"):
        run(job(config(), data, tmp_path))
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_says_what_it_expected_and_what_it_measured(data, tmp_path):
    cfg = config(max_steps=4, resources={"peak_tflops": 0.1})
    run(job(cfg, data, tmp_path / "stated"))
    run(job(config(max_steps=4), data, tmp_path / "silent"))
    first, *_, last = tiny.lines(tmp_path / "stated" / "metrics.jsonl")
    assert first["plan"].startswith("4 steps of 6 rows, 3 accumulated, warm-up 0 steps; about ")
    facts = last["summary"]
    assert facts["timed_steps"] == 4 and last["histogram"].count("\n") == 10
    training = Training(job(cfg, data, tmp_path / "again"), World(0, 1), lambda: None)
    computed = 0  # two rows at a time, the longest first, each as long as the longer of the two
    for step in range(4):
        ordered = sorted(
            (int(training.objective.split.lengths[row]) for row in training.sampler.step(step)), reverse=True
        )
        computed += 2 * sum(ordered[::2])
    assert facts["tokens_per_second_padded"] * facts["timed_seconds"] == pytest.approx(computed)
    assert computed < 4 * 6 * tiny.LENGTH
    assert facts["tokens_per_second_unpadded"] < facts["tokens_per_second_padded"]
    assert facts["tokens_per_second_supervised"] < facts["tokens_per_second_unpadded"]
    assert 0 < facts["data_wait_share"] < 1
    # 2 layers of width 32 and 2 heads of 16, one key-value head, intermediate 64, vocabulary 257
    multiplied = 2 * (2 * 32 * 16 * 3 + 3 * 32 * 64) + 257 * 32
    assert facts["flops_per_token"] == 6 * multiplied + 12 * 2 * 32 * tiny.LENGTH
    assert facts["mfu"] == pytest.approx(facts["tokens_per_second_padded"] * facts["flops_per_token"] / 1e11)
    assert 0.3 < facts["estimated_memory_bytes"] / facts["peak_memory_bytes"] < 3
    silent = tiny.lines(tmp_path / "silent" / "metrics.jsonl")[-1]["summary"]
    assert "mfu" not in silent and "flops_per_second" in silent


def test_what_is_padded_left_or_right_is_the_same_to_rotary_positions(data):
    built = models.build(ModelConfig(**SHAPE), vocab_size=257, eos_token_id=0, seed=0).eval()
    ids = torch.arange(1, 21)[None]
    with torch.no_grad():
        alone = built(input_ids=ids).logits[0]
        filler, mask = torch.zeros(1, 7, dtype=torch.long), torch.ones(1, 20, dtype=torch.long)
        right = built(input_ids=torch.cat([ids, filler], 1), attention_mask=torch.cat([mask, filler], 1)).logits[0, :20]
        left = built(input_ids=torch.cat([filler, ids], 1), attention_mask=torch.cat([filler, mask], 1)).logits[0, 7:]
    assert float((right - alone).abs().max()) < 1e-6
    assert float((left - alone).abs().max()) < 1e-6


def test_a_last_validation_loss_that_is_no_number_ends_the_run_with_the_reason():
    recipe = config()
    with pytest.raises(
        StageError, match=r"step 12: the validation loss of the last weights is nan.*lower learning_rate"
    ):
        probes.require_last_loss(12, math.nan, recipe, Best())
    probes.require_last_loss(12, 2.0, recipe, Best())
    kept = config(export=Weights.best)
    probes.require_last_loss(12, math.nan, kept, Best(loss=2.0, step=5))


def test_a_checkpoint_that_was_just_written_stays_behind_a_later_one_that_is_broken(tmp_path):
    for step in (200, 300):
        checkpoints.save(tmp_path, step, {"step": step}, keep=2)
    (checkpoints.of_step(tmp_path, 300) / "complete.json").unlink()
    checkpoints.save(tmp_path, 250, {"step": 250}, keep=1)
    assert checkpoints.newest(tmp_path, lambda text: None) == checkpoints.of_step(tmp_path, 250)
