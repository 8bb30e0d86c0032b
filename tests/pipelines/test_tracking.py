"""MLflow as a view: outages, first use, deleted experiments, long values, leftovers."""

import fcntl
import http.server
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mlflow
import pytest

from pipelines.config import redacted
from pipelines.lease import identity
from pipelines.params import changed_params
from pipelines.registering import MlflowRegistry, patiently
from pipelines.registry import RegistryReader
from pipelines.tracking import Tracking
from stages.artifacts import Checkpoint
from stages.contract import ResourcesUnavailable, StageError
from tests.pipelines.stubs import MakeConfig, StubResources


@pytest.fixture
def known(tmp_path: Path, fresh_mlflow: Path) -> Path:
    """A state root whose MLflow store has its schema and nothing in it (making one anew takes 2 s)."""
    state = tmp_path / "known"
    shutil.copytree(fresh_mlflow, state)
    return state


def open_tracking(state: Path, experiment: str = "e") -> Tracking:
    return Tracking(f"sqlite:///{state / 'mlflow' / 'mlflow.db'}", state, experiment, 10.0)


@pytest.mark.slow
def test_four_first_users_of_an_empty_directory_all_succeed(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.pipelines.test_tracking import open_tracking;"
        "run = open_tracking(Path(sys.argv[1])).start_parent('p', {}); run.log_metrics({'m': 1.0}, 0); run.close('FINISHED')"
    )
    users = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(4)]
    assert [u.wait(timeout=120) for u in users] == [0, 0, 0, 0]
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}")
    assert [e.name for e in client.search_experiments()].count("e") == 1
    assert len(client.search_runs([e.experiment_id for e in client.search_experiments()])) == 4


def test_the_first_use_of_a_store_waits_for_another_ones(state: Path) -> None:
    """Two schema migrations at once break each other for good."""
    (state / "spool").mkdir(exist_ok=True)
    opened: list[Tracking] = []
    with (state / "spool" / "first-use.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        user = threading.Thread(target=lambda: opened.append(open_tracking(state)))
        user.start()
        user.join(1.0)
        assert user.is_alive() and not opened
    user.join(30.0)
    assert len(opened) == 1


def test_a_call_that_a_lock_refuses_is_made_again_until_its_time_is_over() -> None:
    calls = []

    def call() -> str:
        calls.append(time.monotonic())
        if len(calls) == 1:
            raise OSError("database is locked")
        return "an answer"

    assert patiently(call, 5.0, "tracking.uri=x") == "an answer" and len(calls) == 2
    calls.clear()
    with pytest.raises(ResourcesUnavailable, match=r"tracking\.uri=x \(database is locked\)"):
        patiently(call, -1.0, "tracking.uri=x")


def test_an_absent_server_is_named_within_seconds_without_its_password(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    begun = time.monotonic()
    with pytest.raises(ResourcesUnavailable, match="no MLflow server answers") as error:
        Tracking(f"http://bob:CANARY@127.0.0.1:{port}", tmp_path, "e", 5.0)
    assert time.monotonic() - begun < 15
    assert "CANARY" not in str(error.value)


def test_a_server_that_accepts_and_says_nothing_is_given_up_in_time(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        with pytest.raises(ResourcesUnavailable, match="within 2 s"):
            Tracking(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, "e", 2.0)
        assert time.monotonic() - begun < 10


def test_a_deleted_experiment_is_refused_with_the_two_ways_out(tmp_path: Path) -> None:
    tracking = open_tracking(tmp_path)
    tracking.client.delete_experiment(tracking.experiment_id)
    with pytest.raises(
        ResourcesUnavailable, match=r"restore it \(mlflow experiments restore -x \d+\) or choose another"
    ):
        open_tracking(tmp_path)


def test_a_moved_artifact_root_is_refused(known: Path) -> None:
    open_tracking(known)
    known.rename(known.with_name("moved"))
    with pytest.raises(ResourcesUnavailable, match="does not exist"):
        open_tracking(known.with_name("moved"))


@pytest.mark.slow
def test_a_lock_held_for_seconds_loses_no_metric(known: Path) -> None:
    tracking = open_tracking(known)
    run = tracking.start_parent("p", {})
    holder = sqlite3.connect(known / "mlflow" / "mlflow.db", check_same_thread=False)
    holder.execute("BEGIN EXCLUSIVE")
    threading.Timer(3.0, holder.rollback).start()
    begun = time.monotonic()
    for step in range(20):
        run.log_metrics({"loss": float(step)}, step)
    assert time.monotonic() - begun < 1.0  # the control: the caller did not wait for the lock
    run.close("FINISHED")
    history = tracking.client.get_metric_history(run.run_id or "", "loss")
    assert sorted(m.step for m in history) == list(range(20))


def test_a_journal_that_was_left_behind_is_replayed_without_doubles(known: Path) -> None:
    tracking = open_tracking(known)
    journal = known / "spool" / "feedbeef.jsonl"
    owner = {**identity(), "pid": 2**22 + 1}
    lines = [
        {
            "op": "create",
            "uri": tracking.uri,
            "experiment": tracking.experiment_id,
            "parent": None,
            "name": "lost",
            "tags": {},
            "at": 1000,
            "owner": owner,
        },
        {"op": "metrics", "points": [["loss", 2.5, 2000, 7]]},
        {"op": "metrics", "points": [["a name @ that MLflow refuses", 1.0, 2500, 7]]},
        {"op": "end", "status": "FAILED", "at": 3000},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    for _ in range(2):  # replayed, and replayed again as after a crash in the middle of replaying
        journal.write_text(text + '{"op": "text", "text": "{}", "x": {}')  # cut short behind an inner brace
        open_tracking(known, "another experiment")
        assert not journal.exists()
    found = tracking.client.search_runs([tracking.experiment_id])
    assert [(r.info.run_name, r.info.status) for r in found] == [("lost", "FAILED")]
    assert [(m.step, m.value) for m in tracking.client.get_metric_history(found[0].info.run_id, "loss")] == [(7, 2.5)]


@pytest.mark.slow
def test_a_journal_of_a_process_that_cannot_be_seen_is_sent_when_it_has_not_grown_for_long(known: Path) -> None:
    tracking = open_tracking(known)
    create: dict[str, Any] = {
        "op": "create",
        "uri": tracking.uri,
        "experiment": tracking.experiment_id,
        "parent": None,
        "name": "far",
    }
    create |= {"parent": None, "tags": {}, "at": 1000, "owner": {**identity(), "pids": "another container's"}}
    end = {"op": "end", "status": "FINISHED", "at": 3000}
    for lines, age_s, sent in (([create], 3600, False), ([create, end], 60, False), ([create, end], 3600, True)):
        journal = known / "spool" / "feedbeef.jsonl"
        journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
        os.utime(journal, (time.time() - age_s,) * 2)
        open_tracking(known, "another experiment")
        assert journal.exists() is not sent, (len(lines), age_s)
    assert [r.info.run_name for r in tracking.client.search_runs([tracking.experiment_id])] == ["far"]


def test_a_journal_of_another_store_waits_for_it(known: Path) -> None:
    journal = known / "spool" / "feedbeef.jsonl"
    journal.parent.mkdir()
    create = {"op": "create", "uri": "http://elsewhere", "experiment": "1", "parent": None, "name": "x", "tags": {}}
    journal.write_text(json.dumps({**create, "at": 1, "owner": {**identity(), "pid": 2**22 + 1}}))
    tracking = open_tracking(known)
    assert journal.exists() and not tracking.client.search_runs([tracking.experiment_id])


def test_a_metric_that_mlflow_refuses_holds_nothing_else_up(known: Path) -> None:
    tracking = open_tracking(known)
    run = tracking.start_parent("p", {})
    run.log_metrics({"recall @ 10": 1.0}, 0)
    run.log_metrics({"loss": 2.0}, 0)
    run.close("FINISHED")
    assert run.failed is None and list((known / "spool").glob("*.jsonl")) == []
    assert tracking.client.get_run(run.run_id or "").data.metrics == {"loss": 2.0}


def test_only_what_differs_from_the_defaults_becomes_a_param() -> None:
    assert changed_params(MakeConfig()) == {}
    cfg = MakeConfig(value=3, resources=StubResources(workers=2), inputs={"a": "b"})
    assert changed_params(cfg) == {"value": "3", "resources.workers": "2"}


def test_a_long_value_is_shown_by_its_beginning_and_its_digest() -> None:
    shown = changed_params(MakeConfig(source="x" * 7000))["source"]
    assert shown.startswith("x" * 200 + "... (7000 characters, sha256 ") and len(shown) < 500


def test_the_light_reader_agrees_with_the_registry_that_mlflow_wrote(known: Path) -> None:
    tracking = open_tracking(known)
    run = tracking.start_parent("p", {})
    registry = MlflowRegistry(tracking, run)
    model = Checkpoint(uri=(known / "weights").as_uri(), digest="d" * 64)
    assert registry.find("m", model.digest) is None
    assert registry.register("m", model, {"data": "x"}, {"loss": 1.0}) == 1
    registry.set_alias("m", "candidate", 1)
    reader = RegistryReader(tracking.uri)
    assert reader.find("m", model.digest) == 1
    assert reader.alias("m", "candidate") == 1 and reader.alias("m", "champion") is None
    assert reader.resolve("models:/m@candidate") == reader.resolve("models:/m/1") == (model.uri, model.digest)
    with pytest.raises(StageError, match="no version of 'm' has the alias 'champion'"):
        reader.resolve("models:/m@champion")
    with pytest.raises(StageError, match="models:/name@alias or models:/name/3"):
        reader.resolve("models:/m")
    run.close("FINISHED")


def test_a_registry_behind_http_is_read_the_same_way() -> None:
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = {
                "model_version": {"version": "4", "source": "file:///w", "tags": [{"key": "digest", "value": "abc"}]}
            }
            self.send_response(200 if "champion" in self.path or "get" in self.path else 404)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    reader = RegistryReader(f"http://127.0.0.1:{server.server_port}")
    assert reader.alias("m", "champion") == 4 and reader.alias("m", "candidate") is None
    assert reader.resolve("models:/m@champion") == ("file:///w", "abc")
    server.shutdown()


def test_a_uri_is_shown_without_user_and_password() -> None:
    assert redacted("http://bob:secret@host:5000/x") == "http://host:5000/x"
    assert redacted("sqlite:////a/b.db") == "sqlite:////a/b.db"
    assert redacted("make run 'tracking.uri=http://bob:p@ss@h' x=a@b") == "make run 'tracking.uri=http://h' x=a@b"
