"""`make export` of a real tiny model: what comes out loads in transformers and needs nothing of this project."""

import json
from pathlib import Path

import pytest

from pipelines import export
from pipelines.config import AppConfig
from pipelines.console import Console
from pipelines.mistakes import ConfigError
from pipelines.store import IntegrityError, Record
from stages.artifacts import Checkpoint
from stages.contract import StageError
from tests.pipelines.stored import World


def tiny_model(directory: Path) -> dict[str, bytes]:
    """The files of a real tiny model with a chat template."""
    from tests.stages.tiny_model import save_tiny_model

    source = save_tiny_model(directory, chat_template="{{ messages[0]['content'] }}")
    Checkpoint.write(source, {"architecture": "LlamaForCausalLM"})
    return {path.name: path.read_bytes() for path in source.iterdir()}


def registered(world: World, files: dict[str, bytes]) -> Record:
    """A model as a champion, with data before and a report after it."""
    data = world.result("tokenize", "the data")
    model = world.result("train", "{}", data, files=files)
    report = {"metrics": {"bits_per_byte": 1.65}, "baselines": {}}
    world.result("evaluate", "report", model, data, files={"summary.json": json.dumps(report).encode()})
    world.version("lm", model, "champion")
    return model


def run_export(world: World, monkeypatch: pytest.MonkeyPatch, to: Path, model: str = "models:/lm@champion") -> Path:
    monkeypatch.setenv("MODEL", model)
    monkeypatch.setenv("TO", str(to))
    assert export.export(Console(), world.overrides, None) == 0
    return to


def test_what_is_exported_loads_in_transformers_and_says_where_it_came_from(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = registered(world, tiny_model(tmp_path / "tiny"))
    (tmp_path / "to").mkdir()  # an empty folder is as good as none
    to = run_export(world, monkeypatch, tmp_path / "to")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(to), AutoTokenizer.from_pretrained(to)
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    ids = tokenizer("os.path", return_tensors="pt").input_ids
    assert (model(ids).logits == original(ids).logits).all()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    names = {path.name for path in to.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "README.md"} <= names
    assert not names & {"summary.json", "golden.json", "MANIFEST.json"}
    card = (to / "README.md").read_text()
    assert made.digest in card and "# lm, version 1" in card and "| bits_per_byte | 1.65 |" in card
    assert made.payload["inputs"]["in0"][:16] in card and "tokenize" in card
    assert str(tmp_path) not in card  # nothing of this machine
    assert list(tmp_path.glob(".to.*")) == []


def test_a_folder_with_something_in_it_is_refused(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(world, {"model.safetensors": b"weights"})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        run_export(world, monkeypatch, tmp_path / "full")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_changed_weights_are_not_exported(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = registered(world, {"config.json": b"{}", "model.safetensors": b"weights"})
    key = f"objects/{made.digest}/model.safetensors"
    data = bytearray(world.store.bucket.get(key) or b"")
    data[-1] ^= 1
    world.store.bucket.put(key, bytes(data))
    with pytest.raises(IntegrityError, match=r"model\.safetensors: its bytes changed"):
        run_export(world, monkeypatch, tmp_path / "to")
    assert not (tmp_path / "to").exists() and list(tmp_path.glob(".to.*")) == []


@pytest.mark.parametrize(("model", "to"), [("", "to"), ("quickstart", "to"), ("models:/lm@champion", "")])
def test_what_is_missing_is_asked_for(model: str, to: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MODEL", model)
    monkeypatch.setenv("TO", to)
    with pytest.raises(ConfigError, match=r"make export MODEL=models:/quickstart@champion TO=folder"):
        export.export(Console(), [f"state={tmp_path}"], None)


def test_an_unknown_alias_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "models:/lm@champion")
    monkeypatch.setenv("TO", str(tmp_path / "to"))
    with pytest.raises(StageError, match="no version of 'lm' has the alias 'champion'"):
        export.export(Console(), [f"state={AppConfig(name='x', state=str(tmp_path)).state}"], None)


def test_the_card_of_an_adapter_names_the_base_that_it_needs(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = {"digest": "b" * 64, "name": "owner/base", "revision": "f" * 40, "vocab_size": 9, "weights_sha256": "e" * 64}
    registered(world, {"base.json": json.dumps(base).encode(), "adapter_model.safetensors": b"corrections"})
    card = (run_export(world, monkeypatch, tmp_path / "to") / "README.md").read_text()
    assert f"adapter on `owner/base` (revision {'f' * 40}, SHA-256 of the weights `{'e' * 64}`)" in card
    assert "AutoModelForCausalLM" not in card
