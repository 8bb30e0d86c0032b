"""Code that is edited while a run is under way: what was planned, what is loaded and what is on disk must be one thing."""

import importlib
import random
from pathlib import Path

import pytest

from pipelines.config import AppConfig
from stages.contract import StageError
from tests.pipelines.test_runner import go

VERBS = """
import pathlib
from dataclasses import dataclass
from stages.artifacts import Corpus, EvalReport
from stages.contract import Context, StageConfig, stage

@dataclass(kw_only=True)
class FirstConfig(StageConfig):
    text: str = ""

@stage()
def first(cfg: FirstConfig, ctx: Context) -> Corpus:
    (ctx.output / "rows").mkdir()
    (ctx.output / "rows" / "part-00000.parquet").write_text("x")
    if cfg.text:
        (pathlib.Path(__file__).parent / "limits.py").write_text(cfg.text)
    return Corpus.write(ctx.output, {})
"""
SECOND = """
from dataclasses import dataclass
from stages.artifacts import Corpus, EvalReport
from stages.contract import Context, StageConfig, stage

@dataclass(kw_only=True)
class SecondConfig(StageConfig):
    pass

@stage()
def second(cfg: SecondConfig, ctx: Context, corpus: Corpus) -> EvalReport:
    from PACKAGE.limits import LIMIT
    return EvalReport.write(ctx.output, {"value": LIMIT})
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / f"acme{random.randrange(10**9)}"
    place.mkdir()
    for name, text in (("__init__", ""), ("first", VERBS), ("second", SECOND), ("limits", "LIMIT = 3\n")):
        (place / f"{name}.py").write_text(text.replace("PACKAGE", place.name))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return place


def app(state: Path, package: Path, text: str) -> AppConfig:
    first, second = (importlib.import_module(f"{package.name}.{name}") for name in ("first", "second"))
    stages = {"first": first.FirstConfig(text=text), "second": second.SecondConfig(inputs={"corpus": "first"})}
    return AppConfig(name="moving", state=str(state), stages=stages)


def test_a_stage_whose_code_changed_since_the_run_began_is_not_started(state: Path, package: Path) -> None:
    with pytest.raises(
        StageError, match=rf"second: {package.name}/limits\.py changed since this run began; it was not"
    ):
        go(app(state, package, "LIMIT = 4\n"))
    made = [p.read_text() for p in (state / "store" / "objects").glob("*/summary.json")]
    assert not any("4" in text for text in made)


def test_a_changed_comment_is_no_change(state: Path, package: Path) -> None:
    go(app(state, package, "LIMIT = 3  # as agreed\n"))
    assert any('"value": 3' in p.read_text() for p in (state / "store" / "objects").glob("*/summary.json"))
