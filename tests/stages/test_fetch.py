"""Base models from folders, the registry and a hub's local cache."""

import json
import shutil
from pathlib import Path

import pytest
import transformers

from stages.artifacts import Checkpoint
from stages.contract import ResourcesUnavailable, StageError
from stages.fetch import FetchConfig, fetch, sources
from tests.stages import tiny_dataset as tiny
from tests.stages.tiny_model import save_tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Resolves:
    """A Resolver that says what it was asked."""

    def path(self, path: Path) -> str:
        return f"digest of {path}"

    def model(self, model: str) -> str:
        return f"digest of {model}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "base"
    save_tiny_model(directory, golden=False)
    return directory


@pytest.fixture
def hub(tmp_path, monkeypatch, folder):
    """A local cache as huggingface_hub lays it out, holding owner/tiny at one commit."""
    repository = tmp_path / "hub" / "models--owner--tiny"
    shutil.copytree(folder, repository / "snapshots" / COMMIT)
    (repository / "snapshots" / COMMIT / "README.md").write_text("not needed")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_folder_becomes_a_checkpoint_with_golden_answers(make_context, folder, tmp_path):
    folder = Path(shutil.copytree(folder, tmp_path / "base"))
    (folder / "optimizer.pt").write_bytes(b"not needed")
    ctx = make_context("fetch")
    checkpoint = fetch(FetchConfig(source=str(folder)), ctx)
    checkpoint.check()
    assert (ctx.output / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (ctx.output / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not (ctx.output / "optimizer.pt").exists()
    assert len(json.loads((ctx.output / "golden.json").read_text())["answers"]) == 4
    assert str(folder.parent) not in "".join(f.decode("utf-8", "replace") for f in tiny.tree(ctx.output).values())
    assert checkpoint.summary()["source"] == "folder"
    again = make_context("fetch")
    fetch(FetchConfig(source=str(folder)), again)
    assert tiny.tree(again.output) == tiny.tree(ctx.output)


def test_a_registered_model_keeps_its_golden_answers(make_context, folder, tmp_path):
    registered = tmp_path / "registered"
    shutil.copytree(folder, registered)
    (registered / "golden.json").write_text('{"answers": ["its own"]}')
    ctx = make_context("fetch")
    ctx.registry.register("base", Checkpoint(uri=registered.as_uri(), digest="9" * 64), {}, {})
    ctx.registry.set_alias("base", "champion", 1)
    checkpoint = fetch(FetchConfig(source="models:/base@champion"), ctx)
    assert checkpoint.summary()["digest"] == "9" * 64
    assert (ctx.output / "golden.json").read_text() == '{"answers": ["its own"]}'


def test_a_hub_model_comes_from_the_local_cache_at_its_commit(make_context, hub):
    ctx = make_context("fetch")
    checkpoint = fetch(FetchConfig(source="owner/tiny"), ctx)
    checkpoint.check()
    facts = checkpoint.summary()
    assert (facts["source"], facts["repository"], facts["commit"]) == ("hub", "owner/tiny", COMMIT)
    assert not (ctx.output / "README.md").exists()


def test_a_hub_model_that_is_nowhere_is_named(make_context, hub):
    with pytest.raises(ResourcesUnavailable, match="owner/other at main: not in the local cache"):
        fetch(FetchConfig(source="owner/other"), make_context("fetch"))
    with pytest.raises(ResourcesUnavailable, match=r"owner/tiny@ffffffffff: not whole in the local cache"):
        fetch(FetchConfig(source="owner/tiny", revision="f" * 40), make_context("fetch"))


def test_sources_are_what_the_names_mean_right_now(hub, folder, tmp_path):
    assert sources(FetchConfig(source=str(folder)), Resolves()) == {"model": f"digest of {folder}"}
    assert sources(FetchConfig(source="models:/a@champion"), Resolves()) == {"model": "digest of models:/a@champion"}
    assert sources(FetchConfig(source="owner/tiny"), Resolves()) == {"commit": COMMIT}
    assert sources(FetchConfig(source="owner/x", revision="e" * 40), Resolves()) == {"commit": "e" * 40}
    with pytest.raises(StageError, match="no such folder"):
        sources(FetchConfig(source=str(tmp_path / "missing")), Resolves())


def spoiled(folder: Path, target: Path, spoil) -> FetchConfig:
    shutil.copytree(folder, target)
    spoil(target)
    return FetchConfig(source=str(target))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "evil.Model"}}))


def cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def lacking_a_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (pickled, r"found pytorch_model.bin, which can run code when read; wanted \*.safetensors"),
        (with_code, "auto_map names code that the model brings along"),
        (cut, "the fetched model does not load"),
        (lacking_a_shard, r"names model-00001-of-00002.safetensors, not there"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "config.json").unlink(), "config.json: not readable as JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "holds no JSON object"),
        (lambda folder: (folder / "model.safetensors").unlink(), "found no weights"),
    ],
    ids=["pickle", "code", "cut", "shard", "tokenizer", "no config", "config", "no weights"],
)
def test_models_that_are_not_plain_data_are_refused_by_name(make_context, folder, tmp_path, spoil, message):
    with pytest.raises(StageError, match=message):
        fetch(spoiled(folder, tmp_path / "spoiled", spoil), make_context("fetch"))


def test_a_generation_config_that_could_not_be_saved_again_is_repaired(make_context, folder, tmp_path):
    def contradict(target: Path) -> None:
        (target / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.7, "eos_token_id": 3}')

    ctx = make_context("fetch")
    fetch(spoiled(folder, tmp_path / "base", contradict), ctx)
    kept = transformers.GenerationConfig.from_pretrained(ctx.output)
    kept.validate(strict=True)
    assert kept.eos_token_id == 3
