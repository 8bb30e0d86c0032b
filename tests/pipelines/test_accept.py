"""`run.accept`: a changed code or library is waived for one run, by name, and whoever reads the results is told."""

import dataclasses
import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from pipelines import fingerprint as fp
from pipelines import plan, report, session
from pipelines.config import AppConfig, RunConfig
from pipelines.mistakes import ConfigError
from stages.contract import STAGES
from tests.pipelines.stubs import MakeConfig, executions
from tests.pipelines.test_runner import app_of, go, runs


def accepting(*waivers: str, **more: Any) -> RunConfig:
    return RunConfig(accept=list(waivers), **more)


def planned(app: AppConfig) -> dict[str, plan.Step]:
    return {step.name: step for step in session.planned(app)[0]}


@pytest.fixture
def another_library(monkeypatch: pytest.MonkeyPatch) -> str:
    """From here on the stage `make` declares one library more; returns the change in words."""
    before = STAGES[MakeConfig]
    changed = dataclasses.replace(before, libraries=(*before.libraries, "numpy"))
    monkeypatch.setitem(STAGES, MakeConfig, changed)
    return f"numpy absent -> {fp.versions(('numpy',))['numpy']}"


def test_a_waived_library_is_reused_for_this_run_only(state: Path, request: pytest.FixtureRequest) -> None:
    go(app_of(state))
    change = request.getfixturevalue("another_library")
    assert planned(app_of(state))["make"].reason == f"env.{change}"
    step = planned(app_of(state, run=accepting("make.env")))["make"]
    assert (step.action, step.reason) == ("reuse", f"reused although env {change}: accepted by run.accept")
    assert go(app_of(state, run=accepting("make.env"))).executed == 0
    go(app_of(state))
    assert executions(state) == ["make", "double", "judge", "make"]


def test_what_is_made_from_an_accepted_result_says_so_in_its_record_and_in_the_report(
    state: Path, request: pytest.FixtureRequest
) -> None:
    go(app_of(state))
    change = request.getfixturevalue("another_library")
    outcome = go(app_of(state, run=accepting("make.env"), double={"factor": 5}))
    waiver = f"make.env: {change}"
    marked = {s.name: s.record.meta.get("accepted") for s in outcome.steps if s.record}
    assert marked == {"make": [waiver], "double": [waiver], "judge": [waiver]}
    documents = [json.loads(path.read_text()) for path in (state / "store" / "results").glob("*/??????.json")]
    stored = [d["payload"]["stage"] for d in documents if d.get("meta", {}).get("accepted") == [waiver]]
    assert sorted(stored) == ["double", "judge"]
    shown = next(
        path for path in (state / "mlflow" / "artifacts").rglob("report.html") if "Accepted" in path.read_text()
    )
    assert "make, double, judge rest on it" in shown.read_text()
    written = json.loads((shown.parent / "plan.json").read_text())
    assert {s["name"]: s["accepted"] for s in written["steps"]} == {"make": [waiver], "double": [], "judge": []}
    assert any(waiver in run.data.tags.get("mlflow.note.content", "").replace("\\", "") for run in runs(state))


def test_a_waiver_lets_nothing_else_pass(state: Path, request: pytest.FixtureRequest) -> None:
    go(app_of(state))
    request.getfixturevalue("another_library")
    for run, values, seed in (
        (accepting("make.code"), {}, 0),
        (accepting("make.env", "make.code"), {"make": {"value": 2}}, 0),
        (accepting("make.env"), {}, 1),
        (accepting("double.env"), {}, 0),
    ):
        assert planned(app_of(state, run=run, seed=seed, **values))["make"].action == "run"


def test_an_older_execution_than_the_last_may_be_accepted(state: Path, request: pytest.FixtureRequest) -> None:
    go(app_of(state))
    go(app_of(state, make={"value": 2}))
    change = request.getfixturevalue("another_library")
    step = planned(app_of(state, run=accepting("make.env")))["make"]
    assert step.action == "reuse" and step.accepted == [f"make.env: {change}"]


def test_a_damaged_result_is_never_accepted(state: Path, request: pytest.FixtureRequest) -> None:
    first = go(app_of(state))
    request.getfixturevalue("another_library")
    record = first.steps[0].record
    assert record is not None
    (state / "store" / "objects" / record.digest / "summary.json").unlink()
    assert planned(app_of(state, run=accepting("make.env")))["make"].action == "run"


def test_changed_code_of_a_private_stage_is_waived_by_name(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / f"acme{random.randrange(10**9)}"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "limits.py").write_text("LIMIT = 3\n")
    (package / "verb.py").write_text(
        "from dataclasses import dataclass\n"
        f"from {package.name}.limits import LIMIT\n"
        "from stages.artifacts import EvalReport\n"
        "from stages.contract import Context, StageConfig, stage\n"
        "@dataclass(kw_only=True)\n"
        "class CountConfig(StageConfig):\n"
        "    pass\n"
        "@stage()\n"
        "def count(cfg: CountConfig, ctx: Context) -> EvalReport:\n"
        "    return EvalReport.write(ctx.output, {'value': LIMIT})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    verb = importlib.import_module(f"{package.name}.verb")

    def app(*waivers: str) -> AppConfig:
        fp.code_digests.cache_clear()  # each run of a person is a process of its own
        return AppConfig(
            name="private", state=str(state), stages={"count": verb.CountConfig()}, run=accepting(*waivers)
        )

    assert go(app()).executed == 1
    (package / "limits.py").write_text("# as agreed\nLIMIT = 3\n")
    assert go(app()).executed == 0
    # Of another size: within one second Python's cache of bytecode tells two files apart by that alone.
    (package / "limits.py").write_text("LIMIT = 40\n")
    step = planned(app("count.code"))["count"]
    assert step.reason == f"reused although code {package.name}/limits.py changed: accepted by run.accept"
    assert planned(app())["count"].reason == f"code {package.name}/limits.py changed"
    outcome = go(app())
    assert outcome.executed == 1
    assert (
        state / "store" / "objects" / outcome.steps[0].record.digest / "summary.json"
    ).read_text() == '{\n  "value": 40\n}\n'  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("waiver", "message"),
    [
        ("train.cod", r"run\.accept=train\.cod: only a stage's code and env .* did you mean 'train\.code'\?"),
        ("train", "can be waived"),
        ("train.config", "only a stage's code and env .* that facet says what was asked for"),
        ("train.inputs", "that facet says what was asked for"),
        (".env", "can be waived"),
    ],
)
def test_other_facets_and_typos_are_refused(waiver: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig(accept=[waiver])


def test_a_waiver_for_no_stage_or_for_one_that_is_to_run_anyway_is_refused(state: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.accept=mak: no stage of that name in this run; did you mean 'make'\?"):
        planned(app_of(state, run=accepting("mak.env")))
    with pytest.raises(ConfigError, match=r"run\.accept=make\.env: make is asked for by run\.rerun, so nothing"):
        planned(app_of(state, run=accepting("make.env", rerun=["make"])))


def test_the_drawing_tells_an_accepted_stage_from_a_reused_one(state: Path, request: pytest.FixtureRequest) -> None:
    go(app_of(state))
    request.getfixturevalue("another_library")
    outcome = go(app_of(state, run=accepting("make.env"), judge={"at_least": 3}))
    drawing = report.graph(report.Facts("t", "FINISHED", "", "make run", 0, outcome.steps))
    for state_of_node in ("accepted", "reused", "ran"):
        assert drawing.count(f'class="node {state_of_node}"') == 2  # one in the graph, one in the legend
    assert 'class="node failed"' not in drawing
