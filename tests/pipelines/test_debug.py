"""`make debug`: pdb on stdin, as people type it; real stages on really published results; no Ray, nothing published."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest

from pipelines.config import ROOT

SMALL = ["run.limit=300", "stages.tokenize.vocab_size=300", "stages.tokenize.sequence_length=32"]
SMALL += ["stages.train.max_steps=3", "stages.train.tokens_per_step=512", "stages.evaluate.samples=1"]
INLINE = [f"stages.{name}.resources.executor=inline" for name in ("clean", "tokenize", "evaluate")]
INLINE += ["stages.train.resources.launcher=inline"]
PROGRAM = """
import sys
from pipelines.__main__ import main
code = main(sys.argv[1:])
print("RAY LOADED" if "ray" in sys.modules else "NO RAY")
sys.exit(code)
"""


def cli(state: Path, command: str, *overrides: str, stage: str = "", typed: str = "", code: int = 0) -> str:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, command, f"state={state}", *SMALL, *overrides],
        cwd=ROOT,
        env={**os.environ, "STAGE": stage, "PYTHONPATH": str(ROOT)},
        input=typed,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == code, run.stdout + run.stderr
    return run.stdout + run.stderr


def stored(state: Path) -> set[str]:
    return {path.relative_to(state).as_posix() for path in (state / "store").rglob("*") if path.is_file()} - {
        "store/digests.json"
    }


@pytest.fixture(scope="module")
def ingested(tmp_path_factory: pytest.TempPathFactory, fresh_mlflow: Path) -> Path:
    state = tmp_path_factory.mktemp("debug") / "state"
    shutil.copytree(fresh_mlflow, state)
    cli(state, "run", "run.until=ingest")
    return state


def test_a_stage_stops_before_its_first_line_and_runs_to_its_end_in_a_scratch_directory(ingested: Path) -> None:
    before = stored(ingested)
    said = cli(ingested, "debug", stage="clean", typed="p cfg.min_characters\np rows.summary()['rows']\nn\nc\n")
    assert re.search(r"stages/clean\.py\(\d+\)clean\(\)", said)
    assert "(Pdb) 1\n(Pdb) 300\n" in said
    assert "NO RAY" in said and "in this process, without Ray" in said
    place = Path(re.search(r"done: (\S+)", said)[1])  # type: ignore[index]
    assert (place / "rows" / "part-00000.parquet").exists() and place.is_relative_to(ingested / "debug")
    assert stored(ingested) == before
    assert "clean" not in {p.stem for p in (ingested / "store" / "history" / "quickstart").glob("*.json")}


@pytest.mark.slow
def test_it_stops_again_where_an_error_is_raised_and_ends_with_the_stages_own_exit_code(ingested: Path) -> None:
    said = cli(
        ingested, "debug", "stages.clean.min_characters=199999", stage="clean", typed="c\nw\np tally.rows\nq\n", code=2
    )
    assert "StageError: all 300 rows were filtered out" in said
    assert "(Pdb) 300\n" in said, "the frame that raised is the one that answers"
    assert "raykeel exited with code 2" in said


def test_leaving_is_no_error(ingested: Path) -> None:
    for typed in ("q\n", ""):  # typed, and at the end of the input
        assert "left; what it wrote until then is in" in cli(ingested, "debug", stage="clean", typed=typed)


def test_missing_results_name_the_command_that_makes_them(ingested: Path) -> None:
    said = cli(ingested, "debug", "seed=0", stage="evaluate", code=1)
    assert (
        "evaluate needs the results of train, tokenize, clean, which are not made yet: make run state="
        in said.replace("clean, tokenize, train", "train, tokenize, clean")
    )
    assert "seed=0 run.until=train" in said


def test_a_stage_that_only_hands_work_to_ray_is_refused(ingested: Path) -> None:
    said = cli(ingested, "debug", stage="deploy", code=1)
    assert "deploy only hands work to Ray, so without Ray there is nothing to step through" in said


def test_a_missing_or_mistyped_stage_is_named(ingested: Path) -> None:
    assert "which stage? make debug STAGE=<name>; there are: ingest, clean" in cli(ingested, "debug", code=1)
    assert "STAGE=trian: no stage of that name in this pipeline; did you mean 'train'?" in cli(
        ingested, "debug", stage="trian", code=1
    )


@pytest.mark.slow
def test_every_stage_that_computes_runs_without_ray_in_a_run_and_in_the_debugger(ingested: Path) -> None:
    rules = ["stages.gate.rules.must_beat=[untrained]", "stages.train.max_steps=20"]
    cli(ingested, "run", *INLINE, *rules, "run.until=gate")
    assert not (ingested / "cluster" / "head.json").exists()
    before = stored(ingested)
    for stage in ("ingest", "clean", "tokenize", "train", "evaluate", "gate", "register"):
        said = cli(ingested, "debug", *rules, stage=stage, typed="c\n")
        assert "NO RAY" in said and "done: " in said, stage
    assert "not registered: a version of quickstart" in said and "not moved: quickstart@candidate to version 1" in said
    assert stored(ingested) == before
    assert mlflow.MlflowClient(f"sqlite:///{ingested / 'mlflow' / 'mlflow.db'}").search_registered_models() == []
