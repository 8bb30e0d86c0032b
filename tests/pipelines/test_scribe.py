"""The process that keeps MLflow open: found, started, killed, left behind; drivers that are killed; stores that are taken away."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines import conversation, scribe, services
from pipelines import desk as desks
from pipelines.config import ROOT, AppConfig
from pipelines.conversation import Conversation
from pipelines.dictation import Dictation
from stages.artifacts import Checkpoint
from stages.contract import ResourcesUnavailable, StageError
from tests.pipelines.scribed import await_, client, command, desk_of, ended, runs
from tests.pipelines.stubs import executions


def test_a_run_loads_no_mlflow_and_the_next_one_finds_the_scribe_of_the_first(bare: Path) -> None:
    heavy = (
        "print('LOADED', [m for m in ('mlflow', 'sqlalchemy', 'ray', 'pandas') if m in sys.modules]); sys.exit(code)"
    )
    pids = []
    for value in ("1", "2"):
        run = command(bare, "run", "pipeline=stub", f"stages.make.value={value}", then=heavy)
        said = run.communicate(timeout=120)[0]
        assert run.returncode == 0 and said.endswith("LOADED []\n"), said
        pids.append([one["pid"] for one in desks.running(bare)])
    assert len(pids[0]) == 1 and pids[0] == pids[1]
    assert not list((bare / "spool").glob("*.jsonl"))  # all of it was told when the command returned
    store = client(bare)
    found = store.search_runs([store.get_experiment_by_name("stub").experiment_id])
    assert [run.info.status for run in found] == ["FINISHED"] * 6
    run = command(bare, "status", "pipeline=stub")
    assert f"process {pids[0][0]} for sqlite:" in run.communicate(timeout=60)[0]
    run = command(bare, "down", "pipeline=stub")
    assert "ended the process that keeps MLflow open" in run.communicate(timeout=60)[0]
    assert ended(pids[0][0]) and not desks.running(bare) and not list(desk_of(bare).records.glob("*.json"))


def test_a_scribe_that_is_killed_in_the_middle_loses_nothing_and_doubles_nothing(bare: Path) -> None:
    store = Dictation(desk_of(bare), "stub")
    parent = store.start_parent("parent", {})
    killed = set()
    for part in range(2):
        child = store.start_child(parent, f"child{part}", {})
        for step in range(40):
            if step in (10, 30):  # while lines are on their way
                fresh = await_(lambda: [one["pid"] for one in desks.running(bare) if one["pid"] not in killed])
                os.kill(fresh[0], signal.SIGKILL)
                killed.add(fresh[0])
            child.log_metrics({"loss": float(step)}, step)
            child.log_text("hello", f"{step}.txt")
        child.close("FINISHED")
        registry = store.registry(child)
        assert registry.find("m", "d" * 64) == (1 if part else None)
        assert registry.register("m", Checkpoint("file:///w", "d" * 64), {}, {}) == 1 + part
    parent.close("FINISHED")
    assert parent.failed is None and len(killed) == 4  # the control
    found = runs(bare)
    assert {name: run.info.status for name, run in found.items()} == dict.fromkeys(
        ["parent", "child0", "child1"], "FINISHED"
    )
    for name in ("child0", "child1"):
        history = client(bare).get_metric_history(found[name].info.run_id, "loss")
        assert sorted((m.step, m.value) for m in history) == [(step, float(step)) for step in range(40)]
        assert len(client(bare).list_artifacts(found[name].info.run_id)) == 40
        assert found[name].data.tags["mlflow.parentRunId"] == found["parent"].info.run_id
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "cut"])
def test_a_new_run_whose_answer_was_lost_is_made_once(bare: Path, how: str) -> None:
    store = Dictation(desk_of(bare), "stub")
    sender = store.sender(bare / "spool" / "feedbeef.jsonl", None, asked=False)
    create: dict[str, Any] = {
        "op": "create",
        "experiment": store.experiment_id,
        "name": "once",
        "tags": {},
        "parent": None,
        "at": 1000,
    }
    create["owner"] = {}
    sender.send(create)
    first = sender.run_id
    (one,) = desks.running(bare)
    if how == "killed":
        os.kill(one["pid"], signal.SIGKILL)
    else:
        sender.close()  # the next conversation knows nothing of this one
    sender.run_id = None  # as if the answer had not come
    sender.send(create)
    assert sender.run_id == first and list(runs(bare)) == ["once"]
    store.close()


@pytest.mark.slow
def test_a_killed_driver_is_seen_by_the_scribe_which_closes_its_runs_at_once(bare: Path) -> None:
    run = command(bare, "run", "pipeline=stub", "stages.double.seconds=60")
    await_(lambda: executions(bare) == ["make", "double"], 60)
    assert {name: run.info.status for name, run in runs(bare).items()}["double"] == "RUNNING"  # the control
    run.kill()
    run.communicate(timeout=10)
    await_(lambda: all(run.info.status != "RUNNING" for run in runs(bare).values()))
    status = {name: run.info.status for name, run in runs(bare).items()}
    assert status == {"stub": "KILLED", "double": "KILLED", "make": "FINISHED"}


@pytest.mark.slow
def test_what_a_driver_could_not_say_before_it_was_killed_is_read_from_its_journal(bare: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from tests.pipelines.scribed import desk_of;"
        "from pipelines.dictation import Dictation; from pipelines import desk;"
        "state = Path(sys.argv[1]); store = Dictation(desk_of(state), 'stub'); run = store.start_parent('last', {});"
        "os.kill(desk.running(state)[0]['pid'], signal.SIGSTOP); run.log_metrics({'loss': 0.5}, 7);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    driver = subprocess.run([sys.executable, "-c", script, str(bare)], cwd=ROOT, timeout=60)
    assert driver.returncode == -signal.SIGKILL
    (one,) = desks.running(bare)
    assert "loss" not in runs(bare)["last"].data.metrics  # the control
    os.kill(one["pid"], signal.SIGCONT)
    await_(lambda: runs(bare)["last"].info.status == "KILLED")
    assert runs(bare)["last"].data.metrics == {"loss": 0.5} and not list((bare / "spool").glob("*.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["mlflow", "."])
def test_a_store_that_is_taken_away_is_not_written_to_as_a_ghost(bare: Path, fresh_mlflow: Path, what: str) -> None:
    Dictation(desk_of(bare), "stub").close()
    (one,) = desks.running(bare)
    shutil.rmtree(bare / what)
    shutil.copytree(fresh_mlflow / what, bare / what)  # at once: another database at the same path
    store = Dictation(desk_of(bare), "stub")
    run = store.start_parent("seen", {})
    run.close("FINISHED")
    assert run.failed is None and list(runs(bare)) == ["seen"]
    await_(lambda: ended(one["pid"]))
    store.close()


@pytest.mark.slow
def test_a_scribe_whose_state_root_is_gone_ends_within_seconds(bare: Path) -> None:
    Dictation(desk_of(bare), "stub").close()
    (one,) = desks.running(bare)
    bare.rename(bare.with_name("moved"))
    await_(lambda: ended(one["pid"]), 5)
    assert not Path(one["socket"]).parent.exists() and not bare.exists()


@pytest.mark.slow
def test_a_scribe_that_was_not_needed_for_long_ends(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYKEEL_SCRIBE_IDLE_S", "0.5")
    store = Dictation(desk_of(bare), "stub")
    (one,) = desks.running(bare)
    time.sleep(1.5)
    assert not ended(one["pid"])  # the control: it is needed as long as a driver holds the line
    store.close()
    await_(lambda: ended(one["pid"]), 5)
    assert not Path(one["socket"]).parent.exists() and not desk_of(bare).record.exists()


@pytest.mark.slow
def test_a_scribe_that_does_not_answer_is_replaced(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Dictation(desk_of(bare), "stub").close()
    (one,) = desks.running(bare)
    os.kill(one["pid"], signal.SIGSTOP)
    monkeypatch.setattr(conversation, "GREETING_S", 1.0)
    store = Dictation(desk_of(bare), "stub")
    (another,) = desks.running(bare)
    assert another["pid"] != one["pid"]
    await_(lambda: ended(one["pid"]))
    store.close()


@pytest.mark.slow
def test_other_rights_or_another_code_are_served_by_another_scribe_and_the_idle_one_goes(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = desk_of(bare)
    first = desk.record
    Dictation(desk, "stub").close()
    (one,) = desks.running(bare)
    monkeypatch.setattr(desks, "version", lambda: "other code")
    assert desk.record != first
    monkeypatch.undo()
    for name, value in (("AWS_SECRET_ACCESS_KEY", "CANARY"), ("MLFLOW_TRACKING_TOKEN", "CANARY")):
        monkeypatch.setenv(name, value)
        assert desk.record != first
        monkeypatch.delenv(name)
    assert desk.record == first and replace(desk, uri="http://elsewhere").record != first
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "CANARY")
    Dictation(desk, "stub").close()
    await_(lambda: ended(one["pid"]))
    (another,) = desks.running(bare)
    environ = psutil.Process(another["pid"]).environ()
    assert environ["AWS_SECRET_ACCESS_KEY"] == "CANARY" and "CANARY" not in desk.record.read_text()


def test_nobody_else_can_talk_to_it_and_nothing_secret_is_seen_of_it(state: Path) -> None:
    (one,) = desks.running(state)
    assert f"kept open by process {one['pid']}" in services.tracking(AppConfig(name="stub", state=str(state))).found
    assert Path(one["socket"]).parent.stat().st_mode & 0o777 == 0o700
    assert desk_of(state).record.stat().st_mode & 0o777 == 0o600
    desk = replace(desk_of(state), uri="http://bob:CANARY@127.0.0.1:1")
    with scribe.here(desk):
        assert "CANARY" not in desk.record.read_text() and "CANARY" not in desk.record.name
        with pytest.raises(ResourcesUnavailable, match="no MLflow server answers") as error:
            Conversation(desk).ask(op="open", experiment="stub")
        assert "CANARY" not in str(error.value)


@pytest.mark.slow
def test_a_state_root_with_a_long_path_has_a_socket_all_the_same(tmp_path: Path, fresh_mlflow: Path) -> None:
    deep = tmp_path / ("d" * 100) / "state"
    shutil.copytree(fresh_mlflow, deep)
    with scribe.here(desk_of(deep)):
        store = Dictation(desk_of(deep), "stub")
        run = store.start_parent("deep", {})
        run.close("FINISHED")
        assert run.failed is None and list(runs(deep)) == ["deep"]
        store.close()


def test_errors_come_back_as_what_they_are(state: Path) -> None:
    store = Dictation(desk_of(state), "stub")
    run = store.start_parent("p", {})
    with pytest.raises(StageError, match="has the alias 'champion'"):
        store.registry(run).resolve("models:/m@champion")
    with pytest.raises(ResourcesUnavailable, match="the alias was not moved"):
        store.registry(run).set_alias("m", "candidate", 7)
    run.log_metrics({"recall @ 10": 1.0}, 0)  # a name that MLflow refuses
    run.log_metrics({"loss": 2.0}, 0)
    run.close("FINISHED")
    assert run.failed is None and runs(state)["p"].data.metrics == {"loss": 2.0}
    client(state).delete_experiment(store.experiment_id)
    with pytest.raises(ResourcesUnavailable, match="was deleted: restore it"):
        Dictation(desk_of(state), "stub")
    store.close()


@pytest.mark.slow
def test_several_first_drivers_share_one_scribe(bare: Path) -> None:
    opened: list[Dictation] = []
    threads = [threading.Thread(target=lambda: opened.append(Dictation(desk_of(bare), "stub"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 4 and len({store.experiment_id for store in opened}) == 1
    assert len(desks.running(bare)) == 1
    assert [json.loads(path.read_text())["pid"] for path in desk_of(bare).records.glob("*.json")] == [
        desks.running(bare)[0]["pid"]
    ]
    for store in opened:
        store.close()
