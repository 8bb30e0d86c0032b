"""Compositions and code digests that are kept: equal to fresh ones, and never stale."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import composed, config, fingerprint
from pipelines.config import ROOT, compose, compose_node, to_objects
from pipelines.kept import Kept
from pipelines.mistakes import ConfigError


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(config, "COMPOSED", tmp_path / "composed")
    return tmp_path / "composed"


@pytest.mark.parametrize(
    "words",
    [
        ["pipeline=quickstart"],
        ["pipeline=quickstart", "clean=web"],  # maps whose keys are numbers
        [
            "pipeline=finetune",
            "stages.fetch.source=models:/a@b",
            "run.rerun=[train]",
            "run.on_failure=continue",
            "stages.train.learning_rate=1",
        ],
    ],
)
def test_a_kept_composition_equals_a_fresh_one(own_place: Path, words: list[str]) -> None:
    first = compose(words)
    assert len(list(own_place.glob("*.json"))) == 1
    second = compose(words)
    assert first == second == to_objects(compose_node(words))
    assert type(second.stages["train"].learning_rate) is float  # type: ignore[attr-defined]


def test_a_second_composition_does_not_load_hydra() -> None:
    script = "import sys; from pipelines.config import compose; compose(['seed=77']); print('hydra' in sys.modules)"
    said = [
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert said[1] == "False\n"


def test_a_changed_yaml_a_changed_class_and_another_word_are_another_composition(tmp_path: Path) -> None:
    for package in ("pipelines", "stages", "conf"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    seen = {composed.key(tmp_path, None, ["seed=1"]), composed.key(tmp_path, None, ["seed=2"])}
    for name in ("conf/pipeline/quickstart.yaml", "stages/training/config.py", "pipelines/config.py"):
        path = tmp_path / name
        path.write_text(path.read_text() + "\n# changed\n")
        seen.add(composed.key(tmp_path, None, ["seed=1"]))
    assert len(seen) == 5 and None not in seen


def test_what_asks_its_surroundings_is_composed_anew(tmp_path: Path) -> None:
    assert composed.key(ROOT, None, ["name=${oc.env:HOME}"]) is None
    (tmp_path / "mine.yaml").write_text("name: ${oc.env:USER}\n")
    assert composed.key(ROOT, tmp_path, []) is None
    (tmp_path / "mine.yaml").write_text("name: ${name}\n")
    assert composed.key(ROOT, tmp_path, []) is not None


def test_a_mistake_is_told_every_time() -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match="learning_rat"):
            compose(["stages.train.learning_rat=1"])


def test_a_broken_or_foreign_file_is_not_believed(own_place: Path) -> None:
    app = compose(["seed=3"])
    (kept,) = own_place.glob("*.json")
    kept.write_text("{")
    assert compose(["seed=3"]) == app
    kept.write_text(json.dumps({"=": "os:system", "command": "true"}))
    with pytest.raises(LookupError, match="names os"):
        composed.load(own_place, kept.stem)


def test_code_digests_from_memory_are_those_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "code.json"
    monkeypatch.setattr(fingerprint, "_parsed", Kept(path))
    fingerprint._read_module.cache_clear()
    fresh = fingerprint.code_now("stages.train")
    assert path.exists()
    monkeypatch.setattr(fingerprint, "_parsed", Kept(path))
    fingerprint._read_module.cache_clear()
    monkeypatch.setattr(fingerprint, "normalised", lambda tree: pytest.fail("parsed again"))
    assert fingerprint.code_now("stages.train") == fresh


def test_what_cannot_be_kept_is_found_out_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    kept = Kept(tmp_path / "file" / "facts.json")
    kept.put("a", 1)
    kept.save()
    assert kept.get("a") == 1 and Kept(tmp_path / "file" / "facts.json").get("a") is None
