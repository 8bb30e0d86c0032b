"""The runner on Ray-free stub stages with a real MLflow store: what runs, what is reused, what is left after trouble."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlflow
import pytest

from pipelines import gc, ledger, reasons, report, room, runner, session
from pipelines.config import AppConfig, RunConfig, TrackingConfig, TrackingMode
from pipelines.console import Console
from pipelines.mistakes import ConfigError
from pipelines.store import IntegrityError, Store
from stages.artifacts import ArtifactError, DamagedArtifact
from stages.contract import GateRefused, ResourcesUnavailable, StageError
from tests.pipelines.stubs import DoubleConfig, JudgeConfig, MakeConfig, executions, published


def app_of(state: Path, run: RunConfig | None = None, seed: int = 0, **values: Any) -> AppConfig:
    return AppConfig(
        name="stub",
        state=str(state),
        seed=seed,
        run=run or RunConfig(),
        stages={
            "make": MakeConfig(**values.get("make", {})),
            "double": DoubleConfig(inputs={"rows": "make"}, **values.get("double", {})),
            "judge": JudgeConfig(inputs={"corpus": "double"}, **values.get("judge", {})),
        },
    )


def go(app: AppConfig) -> runner.Outcome:
    console = Console()
    with session.Session(app, console) as opened:
        return runner.run(app, opened, "make run")


def client(state: Path) -> mlflow.MlflowClient:
    return mlflow.MlflowClient(f"sqlite:///{state / 'mlflow' / 'mlflow.db'}")


def runs(state: Path) -> list[Any]:
    c = client(state)
    return list(
        c.search_runs([e.experiment_id for e in c.search_experiments()], order_by=["attributes.start_time ASC"])
    )


def test_a_second_run_executes_nothing_and_writes_no_mlflow_run(state: Path) -> None:
    go(app_of(state))
    assert executions(state) == ["make", "double", "judge"]
    before = len(runs(state))
    outcome = go(app_of(state))
    assert executions(state) == ["make", "double", "judge"]
    assert outcome.executed == 0
    assert len(runs(state)) == before == 4


def test_a_changed_field_reruns_its_stage_and_what_depends_on_it_and_nothing_else(state: Path) -> None:
    go(app_of(state))
    go(app_of(state, double={"factor": 5}))
    assert executions(state) == ["make", "double", "judge", "double", "judge"]


def test_a_rerun_with_equal_bytes_stops_the_wave(state: Path) -> None:
    go(app_of(state))
    # 2 * 6 and 4 * 3 are both 12: the third stage sees the same content.
    go(app_of(state, make={"value": 2}, double={"factor": 6}))
    go(app_of(state, make={"value": 4}, double={"factor": 3}))
    assert executions(state).count("judge") == 2


def test_resources_do_not_rerun_anything(state: Path) -> None:
    from tests.pipelines.stubs import StubResources

    go(app_of(state))
    go(app_of(state, make={"resources": StubResources(workers=7)}))
    assert executions(state) == ["make", "double", "judge"]


def test_rerun_from_executes_a_stage_and_all_below_it(state: Path) -> None:
    go(app_of(state))
    go(app_of(state, run=RunConfig(rerun_from="double")))
    assert executions(state) == ["make", "double", "judge", "double", "judge"]


def test_rerun_of_one_stage_with_equal_bytes_leaves_the_rest_alone(state: Path) -> None:
    go(app_of(state))
    go(app_of(state, run=RunConfig(rerun=["make"])))
    assert executions(state) == ["make", "double", "judge", "make"]


def test_until_stops_after_the_stage(state: Path) -> None:
    go(app_of(state, run=RunConfig(until="double")))
    assert executions(state) == ["make", "double"]


def test_limit_enters_the_fingerprint_of_the_stage_that_reads(state: Path) -> None:
    go(app_of(state))
    go(app_of(state, run=RunConfig(limit=3)))
    assert executions(state)[3:] == ["make"]


def test_a_changed_source_file_reruns_and_a_touched_one_does_not(state: Path, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("one")
    go(app_of(state, make={"source": str(source)}))
    os.utime(source, (1, 1))
    go(app_of(state, make={"source": str(source)}))
    assert executions(state).count("make") == 1
    moved = source.rename(tmp_path / "moved.jsonl")
    go(app_of(state, make={"source": str(moved)}))
    assert executions(state).count("make") == 1
    source = moved
    source.write_text("two")
    go(app_of(state, make={"source": str(source)}))
    assert executions(state).count("make") == 2


def test_a_source_edited_while_it_is_read_is_not_published_as_what_it_was(state: Path, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("one")
    with pytest.raises(StageError, match="its source changed while it was read"):
        go(app_of(state, make={"source": str(source), "edit": True}))
    assert published(state) == {}
    go(app_of(state, make={"source": str(source)}))
    assert executions(state).count("make") == 2


def test_a_missing_source_is_refused_before_anything_starts(state: Path) -> None:
    with pytest.raises(ConfigError, match=r"stages\.make: /nowhere/rows\.jsonl: cannot be read"):
        go(app_of(state, make={"source": "/nowhere/rows.jsonl"}))
    assert runs(state) == [] and executions(state) == []


@pytest.mark.parametrize(("trouble", "kind"), [("user", StageError), ("gate", GateRefused), ("crash", KeyError)])
def test_a_failed_stage_publishes_nothing_and_mlflow_says_failed(
    state: Path, trouble: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        go(app_of(state, double={"trouble": trouble}))
    assert set(published(state)) == {"make"}
    status = {r.data.tags["mlflow.runName"].split()[0]: r.info.status for r in runs(state)}
    assert status == {"stub": "FAILED", "make": "FINISHED", "double": "FAILED"}
    assert list((state / "store" / "staging").iterdir()) == []
    go(app_of(state))
    assert executions(state) == ["make", "double", "double", "judge"]


def test_a_disk_that_fills_during_a_stage_is_named_with_what_is_left(state: Path) -> None:
    with pytest.raises(
        StageError, match=r"double: no space left in .*store \(\d+ MB free\): free some \(make gc\), or set store\.root"
    ):
        go(app_of(state, double={"trouble": "full"}))
    assert set(published(state)) == {"make"} and list((state / "store" / "staging").iterdir()) == []


@pytest.mark.slow
def test_a_killed_driver_leaves_nothing_published_and_the_next_run_is_right(state: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.pipelines.test_runner import app_of, go;"
        "go(app_of(Path(sys.argv[1]), double={'trouble': 'kill'}))"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(state)], capture_output=True, timeout=120)
    assert killed.returncode == -9
    assert set(published(state)) == {"make"}
    statuses = [r.info.status for r in runs(state)]
    assert statuses.count("RUNNING") >= 2 and "KILLED" not in statuses  # the control: the kill really left open runs
    go(app_of(state))
    assert set(published(state)) == {"make", "double", "judge"}
    assert executions(state).count("make") == 1
    ended = [r.info.status for r in runs(state)]
    assert "RUNNING" not in ended and ended.count("KILLED") == 2  # the pipeline and `double`; `make` had been published
    assert list((state / "store" / "staging").glob("*/half-written")) == []


@pytest.mark.slow
def test_ctrl_c_marks_runs_killed_and_leaves_no_staging(state: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from pipelines import session; from tests.pipelines.test_runner import app_of, go\n"
        "with session.signals(): go(app_of(Path(sys.argv[1]), double={'seconds': 60.0}))"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(state)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while "double" not in executions(state):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(2)
    assert process.wait(timeout=15) != 0
    assert {r.info.status for r in runs(state)} == {"FINISHED", "KILLED"}
    assert list((state / "store" / "staging").iterdir()) == []
    assert all(len(list(slots.glob("*.lease.json"))) == 1 for slots in (state / "store" / "results").iterdir())


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "manifest"])
def test_a_damaged_result_is_set_aside_and_made_again(
    state: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    go(app_of(state))
    victim = state / "store" / "objects" / published(state)["double"]
    summary = victim / "summary.json"
    if damage == "flip":
        summary.write_bytes(summary.read_bytes().replace(b"2", b"3"))
    elif damage == "cut":
        summary.write_bytes(summary.read_bytes()[:-2])
    elif damage == "delete":
        summary.unlink()
    else:
        (victim / "MANIFEST.json").write_text("{")
    go(app_of(state))
    assert executions(state) == ["make", "double", "judge", "double"]
    assert "set aside in" in capsys.readouterr().err
    assert len(list((state / "store" / "quarantine").iterdir())) == 1
    assert json.loads(summary.read_text())["value"] == 2


@pytest.mark.slow
def test_two_runs_of_the_same_pipeline_execute_each_stage_once(state: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.pipelines.test_runner import app_of, go;"
        "go(app_of(Path(sys.argv[1]), double={'seconds': 2.0}))"
    )
    both = [subprocess.Popen([sys.executable, "-c", script, str(state)]) for _ in range(2)]
    assert [p.wait(timeout=120) for p in both] == [0, 0]
    assert sorted(executions(state)) == ["double", "judge", "make"]


def test_metrics_reach_mlflow_with_their_steps_and_the_description_names_the_verdict(state: Path) -> None:
    outcome = go(app_of(state))
    child = next(r for r in runs(state) if r.data.tags["mlflow.runName"] == "double")
    history = client(state).get_metric_history(child.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(0, 3.0), (1, 2.0), (2, 1.0)]
    parent = client(state).get_run(outcome.run_id or "")
    assert "FINISHED" in parent.data.tags["mlflow.note.content"]
    assert child.data.tags["mlflow.parentRunId"] == outcome.run_id
    names = {a.path for a in client(state).list_artifacts(outcome.run_id or "")}
    assert names == {"report.html", "plan.json", "config.json"}
    # Only what differs from the defaults is a param.
    assert child.data.params == {"seed": "0"}


def test_plan_says_run_reuse_and_unknown_with_the_field_that_changed(state: Path) -> None:
    go(app_of(state))
    steps, _ = session.planned(app_of(state, double={"factor": 9}))
    assert [(s.name, s.action) for s in steps] == [("make", "reuse"), ("double", "run"), ("judge", "unknown")]
    assert steps[1].reason == "config.factor 2 -> 9"
    assert steps[2].reason == "until double is made"
    assert reasons.as_json(app_of(state), steps)["steps"][1]["changes"] == ["config.factor 2 -> 9"]


def test_an_unwritable_store_is_named(state: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    app = app_of(state)
    app.store.root = str(tmp_path / "file" / "store")
    with pytest.raises(ConfigError, match=r"store\.root=.*cannot be written"):
        go(app)


def test_the_ledger_knows_what_a_run_needs_before_anything_slow_begins(state: Path) -> None:
    go(app_of(state))
    seen: list[ledger.Invocation] = []

    class Watched(session.Session):
        def warm_up(self, *, ray: bool) -> None:
            seen.extend(ledger.read(Store.open(self.app)))
            super().warm_up(ray=ray)

    app = app_of(state, judge={"at_least": 1})
    with Watched(app, Console()) as opened:
        runner.run(app, opened, "make run")
    assert [run.goes_on for run in seen] == [False, True]
    known = published(state)
    assert {step: facts["digest"] for step, facts in seen[1].steps.items()} == {
        "make": known["make"],
        "double": known["double"],
        "judge": None,
    }


def test_a_run_that_could_not_begin_is_none_of_the_last_runs(state: Path) -> None:
    app = app_of(state)
    app.tracking = TrackingConfig(mode=TrackingMode.server, uri="http://127.0.0.1:9", timeout_s=2.0)
    with pytest.raises(ResourcesUnavailable):
        go(app)
    assert Store.open(app).runs() == [] and executions(state) == []


def test_what_was_collected_between_plan_and_entry_is_made_again(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    go(app_of(state))
    require = room.require

    def collect(app: AppConfig, store: Store, *, ray: bool) -> None:
        require(app, store, ray=ray)
        app.store.keep_runs = 0
        gc.sweep(gc.plan(app, store))
        assert store.bucket.children("objects") == []  # the control: everything is gone

    monkeypatch.setattr(room, "require", collect)
    outcome = go(app_of(state, judge={"at_least": 1}))
    assert outcome.executed == 3 and set(published(state)) == {"make", "double", "judge"}
    assert "make, double: gone since the plan was made; planned anew" in capsys.readouterr().err


def test_what_was_collected_between_two_stages_is_made_again(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`judge` is known, but only once `double` is made again with equal bytes; what it reuses then is looked at after it was noted."""
    go(app_of(state))
    note = ledger.Entry.note

    def note_and_lose(self: ledger.Entry, step: str, fingerprint: str | None, digest: str | None = None) -> None:
        note(self, step, fingerprint, digest)
        if step == "judge" and digest is None:
            Store.open(app_of(state)).set_aside(fingerprint or "")

    monkeypatch.setattr(ledger.Entry, "note", note_and_lose)
    assert go(app_of(state, run=RunConfig(rerun=["double"]))).executed == 2
    assert executions(state)[3:] == ["double", "judge"]


def test_a_report_that_cannot_be_written_hides_no_failure(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: Any) -> None:
        raise KeyError("a fact that is not there")

    monkeypatch.setattr(report, "gather", broken)
    with pytest.raises(StageError, match=r"rows\.jsonl:3"):
        go(app_of(state, double={"trouble": "user"}))
    assert "the report was not written: KeyError" in capsys.readouterr().err
    assert {run.info.status for run in runs(state) if run.data.tags["mlflow.runName"].startswith("stub ")} == {"FAILED"}
    assert [run.status for run in ledger.read(Store.open(app_of(state)))] == ["FAILED"]


def test_two_branches_that_condemn_one_input_end_well_and_an_own_mistake_condemns_nothing(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(app_of(state))
    app = app_of(state)
    steps, store = session.planned(app)
    execution = runner._Execution(app, session.Session(app, Console()), store, steps, *[None] * 4)  # type: ignore[arg-type]
    made = steps[0].record
    assert made is not None
    damaged = DamagedArtifact(f"{store.object_uri(made.digest)}/summary.json: its bytes changed since it was published")
    execution._condemn_broken_inputs(
        steps[1], damaged
    )  # the control: the input is whole, somebody made it again meanwhile
    assert store.find(made.fingerprint)[0] == made
    (state / "store" / "objects" / made.digest / "summary.json").write_text("{}")
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(execution._condemn_broken_inputs, steps[1], damaged) for _ in range(2)]
        errors = [branch.exception() for branch in both]
    assert all(isinstance(error, IntegrityError) and "run again" in str(error) for error in errors)
    assert len({str(error).partition("set aside in ")[2] for error in errors}) == 1
    assert len(store.bucket.children("quarantine")) == 1 and store.find(made.fingerprint) == (None, None)


def test_only_damaged_bytes_have_the_inputs_read_again(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that is not what its type promises is the stage's own mistake; reading all inputs again would take hours."""
    go(app_of(state))
    deep: list[str] = []
    verify = Store.verify

    def counted(self: Store, digest: str, *, deep_: list[str] = deep, **how: bool) -> None:
        if how.get("deep"):
            deep_.append(digest)
        verify(self, digest, **how)

    monkeypatch.setattr(Store, "verify", counted)
    with pytest.raises(ArtifactError, match="misses this file"):
        go(app_of(state, double={"trouble": "empty"}))
    assert deep == []
