"""The arithmetic of what a run needs, against published numbers and against what the library really builds and keeps."""

from pathlib import Path

import pytest
import torch

from stages.contract import ResourcesUnavailable
from stages.training import model as models
from stages.training import recompute
from stages.training.config import Adapter, ModelConfig
from stages.training.estimate import (
    ModelShape,
    adapter_numbers,
    duration,
    flops_per_token,
    gigabytes,
    require_room,
    training,
    utilisation,
)
from stages.training.loss import SummedLoss

LLAMA_3_1_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
SMALL = ModelConfig(
    hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
)


def test_parameters_of_a_published_model_are_those_that_are_published():
    assert ModelShape.of(LLAMA_3_1_8B).parameters == 8_030_261_248


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model_that_is_built(tied):
    shape = ModelConfig(**{**vars(SMALL), "tie_word_embeddings": tied})
    built = models.build(shape, vocab_size=257, eos_token_id=0, seed=0)
    assert ModelShape.of(built.config.to_dict()).parameters == models.parameters(built)


@pytest.mark.parametrize(("speed", "wanted"), [(5762, 0.337), (6667, 0.390)])
def test_the_utilisation_of_published_runs_is_that_of_palms_formula(speed, wanted):
    flops = flops_per_token(ModelShape.of(LLAMA_3_1_8B), length=8192)
    assert utilisation(speed, flops, 989e12) == pytest.approx(wanted, abs=5e-4)


def test_frozen_weights_cost_no_gradient_of_their_own():
    shape = ModelShape.of(LLAMA_3_1_8B)
    full, frozen = (flops_per_token(shape, 1, share) for share in (1.0, 0.0))
    assert full - frozen == 2 * shape.multiplied


def kept_bytes(rows: int, length: int, *, computed_again: bool, layers: int = 3) -> int:
    """What autograd really keeps for the backward pass, beside the weights: two packed documents a row."""
    shape = ModelConfig(**{**vars(SMALL), "num_hidden_layers": layers})
    built = models.build(shape, vocab_size=512, eos_token_id=0, seed=0).train()
    if computed_again:
        recompute.enable(built)
    ids = torch.randint(512, (rows, length))
    positions = torch.arange(length // 2).repeat(2)[None].repeat(rows, 1)
    weights = {p.untyped_storage().data_ptr() for p in built.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        SummedLoss(built)(ids, positions, ids)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("length", [128, 512])
def test_what_a_layer_keeps_is_what_the_estimate_says(length):
    found = kept_bytes(2, length, computed_again=False, layers=4) - kept_bytes(
        2, length, computed_again=False, layers=3
    )
    sizes = [estimated(length, layers=layers).activations for layers in (3, 4)]
    assert sizes[1] - sizes[0] == pytest.approx(found, rel=0.02)


def test_layers_that_are_computed_again_keep_their_input_alone():
    found = kept_bytes(2, 128, computed_again=True, layers=4) - kept_bytes(2, 128, computed_again=True, layers=3)
    sizes = [estimated(128, layers=layers, gradient_checkpointing=True).activations for layers in (3, 4)]
    assert sizes[1] - sizes[0] == found == 2 * 128 * 64 * 4


def estimated(length: int = 128, *, layers: int = 3, **given):
    shape = ModelShape(
        hidden=64, intermediate=176, layers=layers, heads=4, key_value_heads=2, head_dim=16, vocabulary=512, tied=True
    )
    values = {"micro_batch_rows": 2, "positions": 10_000, "data_tokens": 0} | given
    return training(shape, length=length, **values)


def test_each_choice_saves_what_it_is_for():
    plain = estimated()
    assert estimated(lean_optimizer=True).optimizer < plain.optimizer / 2
    assert estimated(gradient_checkpointing=True).activations < plain.activations
    assert estimated(gradient_checkpointing=True).seconds == pytest.approx(plain.seconds * 4 / 3)
    assert estimated(workers=2).seconds == plain.seconds / 2
    assert estimated(bfloat16=True).activations < plain.activations
    assert estimated(micro_batch_rows=1).activations == plain.activations // 2
    adapter = estimated(trained=1000)
    assert adapter.gradients == 4000 and adapter.optimizer == 8000 and adapter.weights == plain.weights
    assert adapter.memory < plain.memory + 0.5 * plain.activations


def test_the_parts_of_full_training_are_sixteen_bytes_a_number():
    shape = ModelShape.of(LLAMA_3_1_8B)
    found = training(shape, length=8192, micro_batch_rows=1, positions=8192, data_tokens=0)
    assert found.weights + found.gradients + found.optimizer == 16 * 8_030_261_248
    assert found.memory > found.process + 16 * 8_030_261_248


@pytest.mark.parametrize(
    ("free", "given", "way"),
    [
        (10**9, {"micro_batch_rows": 4096}, "lower resources.micro_batch_rows or set resources.gradient_checkpointing"),
        (10**8, {"trained": 10**8, "micro_batch_rows": 1}, "set optimizer.name=adafactor"),
        (10**8, {"trained": 0, "micro_batch_rows": 1, "length": 8}, "train an adapter of the base"),
    ],
)
def test_what_cannot_fit_is_refused_with_what_would_help(free, given, way):
    with pytest.raises(ResourcesUnavailable, match=way) as refusal:
        require_room(estimated(**given), free)
    assert "are free" in str(refusal.value)


def test_what_fits_is_not_refused_and_workers_of_one_machine_share_it():
    found = estimated()
    require_room(found, int(found.memory / 0.89))
    with pytest.raises(ResourcesUnavailable, match=r"2 here need .*: set resources\.workers <= 1, or "):
        require_room(found, int(found.memory / 0.89), workers_here=2)


def test_an_architecture_in_other_names_is_not_estimated():
    assert ModelShape.of({"n_embd": 768, "n_layer": 12}) is None


SHOWN = {
    "135 M (SmolLM2)": (576, 1536, 30, 9, 3, 64, 49152, True),
    "1.2 G (Llama 3.2 1B)": (2048, 8192, 16, 32, 8, 64, 128256, True),
    "8.0 G (Llama 3.1 8B)": (4096, 14336, 32, 32, 8, 128, 128256, False),
}


@pytest.mark.parametrize("name", SHOWN)
def test_the_memory_that_the_documentation_tells_is_what_a_plan_would_say(name):
    names = ("hidden", "intermediate", "layers", "heads", "key_value_heads", "head_dim", "vocabulary", "tied")
    shape = ModelShape(**dict(zip(names, SHOWN[name], strict=True)))
    ways = (
        {},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "trained": adapter_numbers(shape, Adapter())},
        {"gradient_checkpointing": True, "bfloat16": True, "sharded": True, "workers": 8},
    )
    found = [training(shape, length=512, micro_batch_rows=4, positions=0, data_tokens=0, **way).memory for way in ways]
    row = f"| {name} | " + " | ".join(gigabytes(size) for size in found) + " |"
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text("utf-8")
    assert row in text
    if name.startswith("135"):
        hours = training(shape, length=512, micro_batch_rows=4, positions=10**6, data_tokens=0).seconds
        card = training(
            shape, length=512, micro_batch_rows=4, positions=10**9, data_tokens=0, flops_per_second=0.4 * 989e12
        )
        assert (
            f"{duration(hours).removesuffix(' h')} hours" in text
            and f"{card.seconds / 60:.0f} minutes on an H100" in text
        )
