"""MLflow that tells the truth although its store was slow, lied, was locked or gone. Each test shows that its fault happened."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import pytest

from pipelines import journal, registering, runner, session
from pipelines.config import ROOT, AppConfig, TrackingConfig, TrackingMode
from pipelines.console import Console
from pipelines.dictation import Dictation
from pipelines.journal import Run
from pipelines.lease import identity
from pipelines.registering import MlflowRegistry
from pipelines.registry import RegistryReader
from pipelines.tracking import Tracking
from stages.artifacts import Checkpoint
from stages.contract import ResourcesUnavailable
from tests import services
from tests.pipelines.registry_stubs import PIPELINE, EnlistConfig
from tests.pipelines.scribed import await_, desk_of
from tests.pipelines.stubs import MakeConfig
from tests.services import Proxy, Service

pytestmark = [pytest.mark.slow, pytest.mark.faults]
STEPS = 60


def log_steps(run: Run, first: int, count: int, pause_s: float = 0.05) -> float:
    """Like a training loop; the longest that one call took, in seconds."""
    return log_together([run], first, count, pause_s)


def log_together(runs: list[Run], first: int, count: int, pause_s: float = 0.05) -> float:
    """Several training loops in step; the longest that one call took, in seconds."""
    longest = 0.0
    for step in range(first, first + count):
        for run in runs:
            begun = time.monotonic()
            run.log_metrics({"loss": 1.0 / (step + 1)}, step)
            longest = max(longest, time.monotonic() - begun)
        time.sleep(pause_s)
    return longest


def require_whole(client: mlflow.MlflowClient, experiment: str, spool: Path, names: dict[str, str]) -> None:
    """Each run of `names` (name -> parent's name) is there once, with every step once, its params, tags, text and end."""
    runs = {}
    for run in client.search_runs([experiment]):
        assert run.info.run_name not in runs, f"{run.info.run_name} is there twice"
        runs[run.info.run_name] = run
    assert runs.keys() == names.keys()
    for name, parent in names.items():
        run = runs[name]
        assert run.info.status == "FINISHED"
        assert run.data.params == {"name": name} and run.data.tags["after"] == name
        assert run.data.tags.get("mlflow.parentRunId") == (runs[parent].info.run_id if parent else None)
        history = client.get_metric_history(run.info.run_id, "loss")
        assert sorted((m.step, m.value) for m in history) == [(step, 1.0 / (step + 1)) for step in range(STEPS)]
        assert [item.path for item in client.list_artifacts(run.info.run_id)] == ["note.txt"]
    assert list(spool.glob("*.jsonl")) == []


def finish(run: Run, name: str) -> None:
    run.set_tags({"after": name})
    run.close("FINISHED")


MODES = ("slow", "500", "drop", "deaf")


class Trouble:
    """One way to misbehave, and two runs that meet it."""

    def __init__(self, mode: str, server: Service, place: Path, opened: contextlib.ExitStack) -> None:
        self.mode = mode
        self.proxy = opened.enter_context(Proxy(server.uri, delay_s=5.0))
        self.tracking = Tracking(self.proxy.uri, place, f"e-{place.parent.name}-{mode}", 3.0)
        self.parent = self.tracking.start_parent("parent", {})
        self.parent.log_params({"name": "parent"})

    def begin(self) -> None:
        self.proxy.mode = self.mode
        self.child = self.tracking.start_child(self.parent, "child", {})  # made in the middle of the trouble
        self.child.log_params({"name": "child"})
        for run, name in ((self.parent, "parent"), (self.child, "child")):
            run.log_text(f"by {name}", "note.txt")


def test_a_server_in_trouble_for_some_seconds_misses_nothing_and_doubles_nothing(
    tmp_path: Path, mlflow_server: Service
) -> None:
    """All kinds of trouble side by side, each with a proxy, an experiment and a spool of its own."""
    with contextlib.ExitStack() as opened:
        troubles = [Trouble(mode, mlflow_server, tmp_path / mode, opened) for mode in MODES]
        log_together([one.parent for one in troubles], 0, 20)
        for one in troubles:
            one.begin()
        longest = log_together([one.parent for one in troubles], 20, 40)
        longest = max(longest, log_together([one.child for one in troubles], 0, 40))
        time.sleep(6)
        for one in troubles:
            one.proxy.mode = "pass"
        log_together([one.child for one in troubles], 40, 20)
        for one in troubles:
            assert one.proxy.seen.get(one.mode, 0) >= 2, one.mode  # the control
        assert longest < 1.0  # the stage does not wait: each of these would cost it 3 s or more
        for one in troubles:
            finish(one.child, "child")
        for one in troubles:
            finish(one.parent, "parent")
            assert one.parent.failed is None and one.child.failed is None, one.mode
    client = mlflow.MlflowClient(mlflow_server.uri)
    for one in troubles:
        require_whole(client, one.tracking.experiment_id, one.tracking.spool, {"parent": "", "child": "parent"})


@pytest.fixture
def own_server(tmp_path: Path, postgres: Service) -> Iterator["Restartable"]:
    server = Restartable(services.new_database(postgres), tmp_path / "artifacts")
    yield server
    server.service.stop()


class Restartable:
    """A server that dies and comes back with its memory."""

    def __init__(self, database: str, artifacts: Path) -> None:
        self._database, self._artifacts = database, artifacts
        artifacts.mkdir()
        self.service = services.start_mlflow(database, str(artifacts))

    @property
    def uri(self) -> str:
        return self.service.uri

    def kill(self) -> None:
        self.service.stop(signal.SIGKILL)
        deadline = time.monotonic() + 5  # its worker process ends a moment after it
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", int(self.uri.rpartition(":")[2])), timeout=1).close()
            except OSError:
                return
        pytest.fail("the server still listens")

    def restart(self) -> None:
        self.service = services.start_mlflow(
            self._database, str(self._artifacts), port=int(self.uri.rpartition(":")[2])
        )


def test_a_server_that_is_paused_and_then_killed_and_restarted_misses_nothing(
    tmp_path: Path, own_server: Restartable
) -> None:
    tracking = Tracking(own_server.uri, tmp_path, "e", 3.0)
    run = tracking.start_parent("run", {})
    run.log_params({"name": "run"})
    log_steps(run, 0, 20)
    own_server.service.send(signal.SIGSTOP)
    assert log_steps(run, 20, 10, 0.5) < 0.1
    deadline = time.monotonic() + 15
    while run._error is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run._error is not None  # the control: a request really went unanswered
    own_server.service.send(signal.SIGCONT)
    log_steps(run, 30, 10, 0.2)
    own_server.kill()
    run.log_text("while it was away", "note.txt")
    assert log_steps(run, 40, 20) < 0.1
    own_server.restart()
    finish(run, "run")
    assert run.failed is None
    require_whole(tracking.client, tracking.experiment_id, tracking.spool, {"run": ""})


def test_a_server_that_never_comes_back_costs_its_time_once_and_the_next_run_tells_it_all(
    tmp_path: Path, own_server: Restartable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "CLOSE_TIMEOUT_S", 4.0)
    tracking = Tracking(own_server.uri, tmp_path, "e", 3.0)
    parent = tracking.start_parent("parent", {})
    own_server.kill()
    runs = {"parent": parent, **{name: tracking.start_child(parent, name, {}) for name in ("one", "two", "three")}}
    for name, run in runs.items():
        run.log_params({"name": name})
        run.log_text("hello", "note.txt")
        log_steps(run, 0, STEPS, 0.0)
    begun = time.monotonic()
    for name in ("one", "two", "three", "parent"):
        finish(runs[name], name)
    assert time.monotonic() - begun < 10
    assert parent.failed is not None and str(tracking.spool) in parent.failed and "4 runs" in parent.failed
    assert len(list(tracking.spool.glob("*.jsonl"))) == 4
    own_server.restart()
    _disown(tracking.spool)
    again = Tracking(own_server.uri, tmp_path, "e", 10.0)
    names = {"parent": "", "one": "parent", "two": "parent", "three": "parent"}
    require_whole(again.client, again.experiment_id, again.spool, names)


def _disown(spool: Path) -> None:
    """As if the process that wrote these journals had ended."""
    for path in spool.glob("*.jsonl"):
        first, rest = path.read_text().split("\n", 1)
        gone = {**json.loads(first), "owner": {**identity(), "pid": 2**22 + 1}}
        path.write_text(json.dumps(gone) + "\n" + rest)


def test_a_pipeline_survives_its_tracking_server_and_says_where_the_record_is(
    tmp_path: Path, own_server: Restartable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(journal, "CLOSE_TIMEOUT_S", 3.0)
    app = AppConfig(
        name="stub",
        state=str(tmp_path / "state"),
        tracking=TrackingConfig(mode=TrackingMode.server, uri=own_server.uri, timeout_s=3.0),
        stages={"make": MakeConfig()},
    )
    with session.Session(app, Console()) as opened:
        opened.tracking(app.name)
        own_server.kill()
        outcome = runner.run(app, opened, "make run")
    assert outcome.executed == 1  # and nothing was raised: exit code 0
    said = "".join(capsys.readouterr())
    assert "kept in" in said and "spool" in said
    app.stages["enlist"] = EnlistConfig(inputs={"rows": "make"})
    monkeypatch.setattr(registering, "PATIENCE_S", 2.0)
    for name, value in (("MAX_RETRIES", "0"), ("TIMEOUT", "3")):  # as a store that is opened sets them
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", value)
    with session.Session(app, Console()) as opened:
        opened._tracking["stub"] = _open_without_asking(app, own_server.uri)
        with pytest.raises(ResourcesUnavailable, match=r"cannot be reached|was made"):
            runner.run(app, opened, "make run")


def _open_without_asking(app: AppConfig, uri: str) -> Tracking:
    """A store that went away after it was opened."""
    made = Tracking.__new__(Tracking)
    made.uri, made.spool, made.experiment_id = uri, app.state_root / "spool", "1"
    made.client = mlflow.MlflowClient(uri, uri)
    return made


HOLD = """
import sqlite3, sys, time
held = sqlite3.connect(sys.argv[1], timeout=60)
held.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
time.sleep(float(sys.argv[2]))
held.rollback()
"""


@contextlib.contextmanager
def held(database: Path, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Another process with an exclusive lock; shows that it is one."""
    command = [sys.executable, "-c", HOLD, str(database), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        yield holder
        assert holder.wait(timeout=seconds + 30) == 0


class Waiting:
    """A run and a registry whose database another process holds; a thread moves an alias meanwhile."""

    def __init__(self, seconds: float, store: Tracking | Dictation, database: Path) -> None:
        self.seconds, self.store, self.database = seconds, store, database
        self.run = store.start_parent("run", {})
        self.registry = store.registry(self.run) if isinstance(store, Dictation) else MlflowRegistry(store, self.run)
        self.version = self.registry.register("m", Checkpoint(uri="file:///w", digest="d" * 64), {}, {})
        self.run.log_params({"name": "run"})
        self.waited: dict[str, float] = {}
        self.threads: list[threading.Thread] = []
        self.wait_for("alias", lambda: self.registry.set_alias("m", "candidate", self.version))

    def wait_for(self, name: str, what: Callable[[], object]) -> None:
        def call() -> None:
            begun = time.monotonic()
            what()
            self.waited[name] = time.monotonic() - begun

        self.threads.append(threading.Thread(target=call))

    def require_whole(self) -> None:
        assert self.registry.alias("m", "candidate") == self.version
        finish(self.run, "run")
        assert self.run.failed is None
        client = mlflow.MlflowClient(f"sqlite:///{self.database}")
        require_whole(client, self.store.experiment_id, self.store.spool, {"run": ""})


def test_a_database_locked_by_another_process_loses_nothing(
    tmp_path: Path, bare: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For ten seconds and for a minute, without a scribe and with one: three databases, side by side."""
    all_of_them = []
    for seconds in (10.0, 60.0):
        place = tmp_path / f"{seconds:.0f}"
        place.mkdir()
        tracking = Tracking(f"sqlite:///{place / 'mlflow.db'}", place, "e", 10.0)
        all_of_them.append(Waiting(seconds, tracking, place / "mlflow.db"))
    short, long = all_of_them
    scribed = Waiting(60.0, Dictation(desk_of(bare), "stub"), bare / "mlflow" / "mlflow.db")
    scribed.wait_for("opened", lambda: Dictation(desk_of(bare), "stub").close())
    all_of_them.append(scribed)
    with contextlib.ExitStack() as locks:
        for one in all_of_them:  # in order: the shortest is released last, when it is over for long
            locks.enter_context(held(one.database, one.seconds))
            for thread in one.threads:
                thread.start()
            assert log_steps(one.run, 0, STEPS, 0.0) < 0.1
        short.run.log_text("hello", "note.txt")
        for one in (long, scribed):
            await_(lambda one=one: one.run._error is not None and "locked" in one.run._error, 50)  # the control
            one.run.log_text("hello", "note.txt")
        for one in all_of_them:
            for thread in one.threads:
                thread.join(timeout=120)
    assert scribed.waited.keys() == {"alias", "opened"}
    for one in all_of_them:
        assert one.waited["alias"] > one.seconds - 2  # the control: it had to wait
        one.require_whole()
    assert not caplog.records
    scribed.store.close()


def test_a_registry_that_stays_locked_ends_with_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = tmp_path / "mlflow.db"
    tracking = Tracking(f"sqlite:///{database}", tmp_path, "e", 10.0)
    run = tracking.start_parent("run", {})
    registry = MlflowRegistry(tracking, run)
    registry.register("m", Checkpoint(uri="file:///w", digest="d" * 64), {}, {})
    monkeypatch.setattr(registering, "PATIENCE_S", 5.0)
    with held(database, 24.0), pytest.raises(ResourcesUnavailable, match=r"alias was not moved to version 1 .*locked"):
        registry.set_alias("m", "candidate", 1)
    run.close("FINISHED")


SCRIPT = "import sys; from tests.pipelines import stubs, registry_stubs; from pipelines.__main__ import main; sys.exit(main())"


def cli(place: Path, *overrides: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    (place / "conf" / "pipeline").mkdir(parents=True, exist_ok=True)
    (place / "conf" / "pipeline" / "stub.yaml").write_text(PIPELINE)
    command = [sys.executable, "-c", SCRIPT, "run", "pipeline=stub", f"state={place / 'state'}", *overrides]
    return subprocess.Popen(
        [*command, "--conf", str(place / "conf")],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("trial", range(5))
def test_four_pipelines_at_once_in_an_empty_directory_all_succeed(trial: int, tmp_path: Path) -> None:
    runs = [cli(tmp_path, f"stages.make.value={number}", f"stages.enlist.name=m{number}") for number in range(4)]
    said = [run.communicate(timeout=240)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0, 0], "\n".join(said)
    assert not [text for text in said if "MLflow:" in text]
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'state' / 'mlflow' / 'mlflow.db'}")
    experiments = client.search_experiments()
    assert [e.name for e in experiments].count("stub") == 1
    found = client.search_runs([e.experiment_id for e in experiments])
    assert [r.info.status for r in found] == ["FINISHED"] * 12
    assert len(client.search_registered_models()) == 4


def test_a_kill_between_version_and_alias_is_mended_by_the_rerun(tmp_path: Path) -> None:
    database = tmp_path / "state" / "mlflow" / "mlflow.db"
    reader = RegistryReader(f"sqlite:///{database}")
    first = cli(tmp_path)
    assert first.wait(timeout=120) == 0
    before = reader.resolve("models:/m@candidate")
    killed = cli(tmp_path, "stages.make.value=2", env={"RAYKEEL_KILL_AT": "candidate:before-alias"})
    assert killed.wait(timeout=120) == -signal.SIGKILL
    client = mlflow.MlflowClient(reader.uri)
    assert len(client.search_model_versions("name = 'm'")) == 2  # the control: made, and nobody points at it
    assert reader.alias("m", "candidate") == 1 and reader.resolve("models:/m@candidate") == before
    again = cli(tmp_path, "stages.make.value=2")
    assert again.wait(timeout=120) == 0
    assert len(client.search_model_versions("name = 'm'")) == 2
    assert reader.alias("m", "candidate") == 2
    uri, digest = reader.resolve("models:/m@candidate")
    assert (uri, digest) != before and (Path(uri.removeprefix("file://")) / "MANIFEST.json").exists()
    left = client.search_runs([e.experiment_id for e in client.search_experiments()], "attributes.status = 'RUNNING'")
    assert not left  # what the kill left behind was closed


@pytest.fixture
def paused() -> Iterator[str]:
    script = textwrap.dedent(
        """
        import http.server
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
        print(server.server_port, flush=True)
        server.serve_forever()
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        port = server.stdout.readline().strip()
        server.send_signal(signal.SIGSTOP)
        yield f"127.0.0.1:{port}"
        server.kill()


@pytest.mark.parametrize("kind", ["absent", "paused", "unknown name"])
def test_a_server_that_is_not_there_at_the_start_is_named_within_seconds(
    kind: str, tmp_path: Path, paused: str
) -> None:
    place = {
        "absent": f"127.0.0.1:{services.free_port()}",
        "paused": paused,
        "unknown name": "no-such-host.invalid:5000",
    }
    uri = f"http://bob:CANARY@{place[kind]}"
    begun = time.monotonic()
    run = cli(tmp_path, "tracking=server", f"tracking.uri={uri}")
    said = run.communicate(timeout=60)[0]
    assert run.returncode == 5 and time.monotonic() - begun < 15 + 5  # 5 s: this process starts, plans and ends
    assert len([line for line in said.splitlines() if "tracking.uri=" in line]) == 1
    assert place[kind] in said and "CANARY" not in said and "bob" not in said
    assert "Traceback" not in said and not (tmp_path / "state" / "executions.log").exists()
