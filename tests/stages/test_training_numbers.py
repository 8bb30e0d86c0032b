"""Plain numbers of training: the schedule, the sampler, the lengths, the parameter groups, the isolation of documents."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers

from stages.contract import StageError
from stages.training import model
from stages.training.config import (
    Algorithm,
    EarlyStopping,
    ModelConfig,
    Optimizer,
    Schedule,
    Shape,
    TokenRecipe,
    Weights,
)
from stages.training.optimizer import learning_rate, made, take
from stages.training.sampler import RowSampler
from tests.stages.training_jobs import SHAPE


def rates(steps: int, **given) -> list[float]:
    values = {"minimum_ratio": 0.1, "warmup_ratio": 0.1} | given
    return [learning_rate(step, steps, 1.0, Schedule(**values)) for step in range(steps)]


@pytest.mark.parametrize("shape", Shape)
def test_every_schedule_rises_to_its_peak_and_warm_up_ends_exactly_there(shape):
    values = rates(100, shape=shape)
    assert values[0] == pytest.approx(0.1)
    assert values[4] == pytest.approx(0.5)
    assert values[8] == pytest.approx(0.9)
    assert values[9] == 1.0 == max(values)
    assert values[10] <= 1.0


def test_a_cosine_is_half_way_down_in_the_middle_and_ends_at_its_minimum():
    values = rates(100)
    assert values[54] == pytest.approx(0.55)  # half way from the peak at 9 to the end at 99
    assert values[99] == pytest.approx(0.1)
    assert all(b < a for a, b in pairwise(values[9:]))
    # a quarter of the way down: (1 + cos 45 degrees) / 2 of what is above the minimum
    assert rates(9, warmup_ratio=0.0, minimum_ratio=0.0)[2] == pytest.approx(0.853553, abs=1e-6)


def test_a_line_falls_by_the_same_amount_each_step_to_its_minimum():
    values = rates(100, shape=Shape.linear)
    assert values[54] == pytest.approx(0.55) and values[99] == pytest.approx(0.1)
    assert {round(a - b, 9) for a, b in pairwise(values[9:])} == {0.01}


def test_warm_up_stable_decay_stays_at_its_peak_and_falls_over_the_last_share():
    values = rates(100, shape=Shape.wsd, decay_ratio=0.2)
    assert set(values[9:80]) == {1.0}
    assert values[80] == pytest.approx(1 - 0.9 / 20) and values[89] == pytest.approx(0.55)
    assert values[99] == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"warmup_ratio and decay_ratio must be at most 1 together, got 1\.5"):
        Schedule(shape=Shape.wsd, warmup_ratio=0.7, decay_ratio=0.8)


def test_a_constant_rate_stays_at_its_peak():
    assert set(rates(100, shape=Shape.constant)[9:]) == {1.0}


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("shape", Shape)
def test_the_schedule_of_the_shortest_runs_stays_within_its_bounds(steps, shape):
    for warmup in (0.0, 0.5, 1.0):
        decay = min(0.2, 1 - warmup)
        values = rates(steps, shape=shape, warmup_ratio=warmup, decay_ratio=decay)
        assert all(0 < value <= 1.0 for value in values)
        assert max(values) == 1.0


def test_without_warm_up_the_first_step_is_the_peak():
    assert rates(10, warmup_ratio=0.0)[0] == 1.0


def test_seven_rows_four_to_a_step_are_two_steps_and_the_last_has_the_last_rate():
    recipe = TokenRecipe(epochs=1, tokens_per_step=4 * 64)
    sampler = RowSampler(rows=7, rows_per_step=recipe.rows_per_step(64), total_rows=recipe.total_rows(7, 64), seed=0)
    assert [len(sampler.step(step)) for step in range(sampler.steps)] == [4, 3]
    for shape in (Shape.cosine, Shape.linear, Shape.wsd):
        schedule = Schedule(shape=shape, warmup_ratio=0.0, decay_ratio=0.5, minimum_ratio=0.25)
        assert learning_rate(sampler.steps - 1, sampler.steps, 0.8, schedule) == pytest.approx(0.2)


def test_each_row_comes_once_per_epoch_in_an_order_of_seed_and_epoch_alone():
    sampler = RowSampler(rows=23, rows_per_step=5, total_rows=23 * 3, seed=7)
    stream = np.concatenate([sampler.step(step) for step in range(sampler.steps)])
    epochs = stream.reshape(3, 23)
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    other_batch = RowSampler(rows=23, rows_per_step=8, total_rows=23 * 3, seed=7)
    assert np.array_equal(stream, np.concatenate([other_batch.step(s) for s in range(other_batch.steps)]))
    assert not np.array_equal(stream, np.concatenate([RowSampler(23, 5, 69, 8).step(s) for s in range(14)]))
    assert sampler.state(5) == {"seed": 7, "epoch": 1, "cursor": 2}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_ranks_share_a_step_without_gap_or_double(world):
    sampler = RowSampler(rows=23, rows_per_step=7, total_rows=23, seed=0)
    taken = [row for step in range(sampler.steps) for rank in range(world) for row in sampler.step(step)[rank::world]]
    assert sorted(taken) == list(range(23))


def test_lengths_are_whole_steps():
    def total(**length) -> int:
        return TokenRecipe(tokens_per_step=1024, **length).total_rows(rows=37, sequence_length=128)

    assert total(max_steps=3) == 24
    assert total(max_tokens=1024 * 3 + 1) == 32
    assert total(epochs=2) == 74
    assert total(epochs=0.5) == 18
    assert RowSampler(rows=37, rows_per_step=8, total_rows=total(epochs=2), seed=0).steps == 10


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of max_steps, max_tokens, epochs, got none"),
        ({"max_steps": 1, "epochs": 1.0}, "exactly one"),
        ({"max_steps": 0}, "max_steps must be above 0, got 0"),
        ({"max_steps": 1, "learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"max_steps": 1, "max_nonfinite_steps": -1}, "max_nonfinite_steps must be 0 or more"),
        (
            {"max_steps": 1, "validate_every": 0, "early_stopping": EarlyStopping()},
            "early_stopping needs validate_every",
        ),
        ({"max_steps": 1, "validate_every": 0, "export": Weights.best}, "export: best needs validate_every above 0"),
        ({"max_steps": 1, "tokens_per_step": 0}, "tokens_per_step must be at least 1"),
    ],
)
def test_impossible_recipes_name_the_field(values, message):
    with pytest.raises(ValueError, match=message):
        TokenRecipe(**values)


@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        (Schedule, {"warmup_ratio": 1.5}, "schedule.warmup_ratio must be from 0 to 1, got 1.5"),
        (Schedule, {"minimum_ratio": -0.1}, "schedule.minimum_ratio must be from 0 to 1"),
        (Optimizer, {"beta2": 1.0}, "optimizer.beta2 must be from 0 to below 1"),
        (Optimizer, {"weight_decay": -1.0}, "optimizer.weight_decay must be 0 or more"),
        (EarlyStopping, {"patience": 0}, "early_stopping.patience must be at least 1"),
        (EarlyStopping, {"min_delta": -1.0}, "early_stopping.min_delta must be 0 or more"),
    ],
)
def test_impossible_settings_of_a_group_name_the_group_and_the_field(group, values, message):
    with pytest.raises(ValueError, match=message):
        group(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size must be a multiple of 2"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads must divide"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
    ],
)
def test_impossible_shapes_name_the_field(values, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**SHAPE | values)


def small(**values):
    return model.build(ModelConfig(**SHAPE | values), vocab_size=257, eos_token_id=0, seed=0)


@pytest.mark.parametrize("name", Algorithm)
def test_norms_and_embeddings_have_no_weight_decay(name):
    built = small(tie_word_embeddings=False)
    decayed, kept = made(built, Optimizer(name=name)).param_groups
    names = {id(p): n for n, p in built.named_parameters()}
    assert decayed["weight_decay"] == 0.1 and kept["weight_decay"] == 0.0
    assert sorted(names[id(p)] for p in kept["params"]) == sorted(
        n for n in names.values() if "norm" in n or "embed" in n
    )
    assert "lm_head.weight" in {names[id(p)] for p in decayed["params"]}


def test_a_model_depends_on_shape_and_seed_and_is_float32():
    with torch.random.fork_rng():
        torch.manual_seed(99)
        first = small().state_dict()
    second = small().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {tensor.dtype for tensor in first.values()} == {torch.float32}


def test_packed_documents_are_isolated_in_the_real_class():
    found = model.leak(small(), 257)
    assert found < 1e-5, found
    model.require_isolation(small(), 257)


def test_a_model_that_lets_packed_documents_see_each_other_is_refused():
    class Leaky(transformers.LlamaForCausalLM):
        def forward(self, *, use_cache=None, **kwargs):
            return super().forward(use_cache=True, **kwargs)  # the library's default: it leaks

    leaky = Leaky(small().config)
    assert model.leak(leaky, 257) > 1e-3
    with pytest.raises(StageError, match="packed documents see each other"):
        model.require_isolation(leaky, 257)


def test_adafactor_keeps_rows_and_columns_of_what_adamw_keeps_whole():
    sizes = {}
    for name in Algorithm:
        built = small()
        optimizer = made(built, Optimizer(name=name))
        for parameter in built.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        sizes[name] = sum(t.numel() for state in optimizer.state.values() for key, t in state.items() if key != "step")
    shapes = [parameter.shape for parameter in small().parameters()]
    assert sizes[Algorithm.adamw] == 2 * sum(shape.numel() for shape in shapes)
    assert sizes[Algorithm.adafactor] == sum(sum(shape) for shape in shapes)
    assert sizes[Algorithm.adafactor] < sizes[Algorithm.adamw] / 20


def test_a_step_of_adafactor_is_what_its_paper_says():
    """Shazeer and Stern 2018, algorithm 4, at its first step, written out for one matrix and one vector."""
    layer = torch.nn.Linear(3, 2)
    before = [p.detach().double().clone() for p in layer.parameters()]
    gradients = [torch.tensor([[1.0, -2.0, 0.5], [0.1, 3.0, -0.2]]), torch.tensor([0.3, -0.4])]
    for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
        parameter.grad = gradient.clone()
    take(made(layer, Optimizer(name=Algorithm.adafactor, weight_decay=0.0)), 0.01)
    for parameter, old, gradient in zip(layer.parameters(), before, gradients, strict=True):
        square = gradient.double() ** 2
        if square.ndim == 2:
            square = torch.outer(square.mean(1), square.mean(0)) / square.mean()
        update = gradient.double() / square.sqrt()
        update /= max(1.0, float(update.pow(2).mean().sqrt()))
        wanted = old - max(1e-3, float(old.pow(2).mean().sqrt())) * 0.01 * update
        assert torch.allclose(parameter.double(), wanted, atol=1e-7)
