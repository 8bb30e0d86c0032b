"""The estimate of a planned run: what the run itself will say, as far as it can be known before."""

import json
from pathlib import Path

import pytest
import transformers

from stages.contract import StageConfig
from stages.tokenize import TokenizeConfig
from stages.train import foreseen
from stages.training import adapters
from stages.training.config import Adapter
from stages.training.estimate import ModelShape, adapter_numbers
from stages.training.loop import Training
from stages.training.memory import free_memory, total_memory
from stages.training.outlook import Given, _mean_length
from stages.training.resources import Launcher
from stages.training.world import World
from tests.stages import tiny_dataset as tiny
from tests.stages.training_jobs import SHAPE, config, job

TARGETS = [["all-linear"], ["q_proj", "v_proj"], ["down_proj"]]


def stored(directory: Path, cfg: StageConfig | None = None) -> Given:
    return Given(cfg or StageConfig(), lambda name: json.loads((directory / name).read_text()))


def unmade(cfg: StageConfig) -> Given:
    return Given(cfg, lambda name: None)


@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_the_numbers_of_an_adapter_are_those_that_peft_trains(targets):
    given = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=72,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    adapter = Adapter(r=4, target_modules=targets)
    model = adapters.attach(transformers.LlamaForCausalLM(given), adapter, seed=0)
    shape = ModelShape.of(given.to_dict())
    assert shape is not None and adapter_numbers(shape, adapter) == adapters.trained(model)


def test_with_its_data_stored_it_is_what_the_run_says_at_its_start(tmp_path):
    data = tiny.dataset(tmp_path)[0]
    cfg = config(launcher=Launcher.inline)
    planned = foreseen(cfg, {"dataset": stored(data.local())})
    assert planned == Training(job(cfg, data, tmp_path / "work"), World(0, 1), lambda: None).forecast.estimate


def test_padding_takes_no_time_that_is_foreseen():
    cfg = config(max_steps=None, epochs=1)
    facts = {"sequence_length": 64, "vocab_size": 257, "train": {"rows": 60, "tokens": 60 * 16}}
    short, full = (
        foreseen(cfg, {"dataset": Given(StageConfig(), lambda name, train=train: facts | {"train": train})})
        for train in (facts["train"], {"rows": 60})
    )
    assert short is not None and full is not None and short.seconds == pytest.approx(full.seconds / 4)
    pairs = {"pairs": 10, "prompt_tokens": 100, "chosen_tokens": 60, "rejected_tokens": 20}
    assert _mean_length(pairs, 512) == 14.0, "the prompt is read with either answer"


def test_before_its_data_are_made_it_takes_the_length_of_rows_from_who_will_make_them():
    cfg = config(launcher=Launcher.torchrun)  # 384 tokens a step: 6 rows of 64, for two workers
    planned = foreseen(cfg, {"dataset": unmade(TokenizeConfig(sequence_length=64, vocab_size=257))})
    assert planned is not None and planned.workers == 2 and planned.data == 0
    shape = ModelShape.of(SHAPE | {"tie_word_embeddings": True}, 257)
    assert shape is not None and planned.weights == 4 * shape.parameters
    assert planned.seconds > 0
    passes = foreseen(
        config(max_steps=None, epochs=1), {"dataset": unmade(TokenizeConfig(sequence_length=64, vocab_size=257))}
    )
    assert passes is not None and passes.seconds == 0 and " min" not in passes.text(), "how many rows is not known"


def test_what_is_not_known_is_not_estimated():
    data = {"dataset": unmade(TokenizeConfig(sequence_length=64))}
    assert foreseen(config(), data) is None, "no vocabulary"
    assert foreseen(config(model=None), data | {"base": unmade(StageConfig())}) is None, "no shape"


def test_a_stored_base_gives_its_shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"vocab_size": 300, "tie_word_embeddings": True}))
    data = unmade(TokenizeConfig(sequence_length=64))
    planned = foreseen(config(model=None, adapter=Adapter(r=2)), {"dataset": data, "base": stored(tmp_path)})
    shape = ModelShape.of(SHAPE | {"vocab_size": 300, "tie_word_embeddings": True})
    assert planned is not None and shape is not None
    assert planned.weights == 4 * shape.parameters and planned.gradients == 4 * adapter_numbers(shape, Adapter(r=2))


def test_no_more_memory_is_free_than_there_is():
    free, total = free_memory(), total_memory()
    assert free is not None and total is not None and 0 < free < total
