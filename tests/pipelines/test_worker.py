"""Steps side by side in processes of their own: what overlaps, what is tried again, what ends it, and what is left afterwards."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines import runner
from pipelines.config import AppConfig, ClusterConfig, ClusterMode, OnFailure, RunConfig
from pipelines.console import Console
from pipelines.lease import LeaseLost, Slots
from pipelines.pool import MayPass, WorkerProcess, converse
from pipelines.session import Session
from pipelines.store import Store
from pipelines.worker import Job
from stages.artifacts import Rows
from stages.contract import GateRefused, StageConfig, StageError, StageResources
from stages.storage.bucket import Bucket, BucketError
from tests.pipelines.stubs import (
    AskConfig,
    DoubleConfig,
    JudgeConfig,
    MakeConfig,
    StubResources,
    events,
    executions,
    published,
)
from tests.pipelines.test_runner import app_of, client, go, runs


def branches(state: Path, run: RunConfig | None = None, cpus: int = 8, **doubles: dict[str, Any]) -> AppConfig:
    """`make`, and one `double` below it for each name."""
    stages: dict[str, StageConfig] = {"make": MakeConfig()}
    stages |= {name: DoubleConfig(inputs={"rows": "make"}, **values) for name, values in doubles.items()}
    return AppConfig(
        name="stub", state=str(state), run=run or RunConfig(), stages=stages, cluster=ClusterConfig(num_cpus=cpus)
    )


def most_at_once(state: Path) -> int:
    """How many `double`s ran at the same time."""
    level = most = 0
    for _, event, _, _ in sorted(events(state), key=lambda e: e[2]):
        level += 1 if event == "begin" else -1
        most = max(most, level)
    return most


def children(state: Path, name: str = "double") -> list[Any]:
    return [r for r in runs(state) if r.data.tags["mlflow.runName"].split()[0] == name]


def test_independent_branches_run_at_the_same_time_in_processes_of_their_own(state: Path) -> None:
    go(branches(state, left={"factor": 2, "seconds": 0.7}, right={"factor": 3, "seconds": 0.7}))
    assert most_at_once(state) == 2
    processes = {pid for _, _, _, pid in events(state)}
    assert len(processes) == 2 and os.getpid() not in processes


@pytest.mark.parametrize(("wanted", "max_parallel", "at_once"), [(1.0, 2, 2), (3.0, 4, 1), (9.0, 4, 1)])
def test_no_more_runs_at_once_than_cpus_and_max_parallel_allow(
    state: Path, monkeypatch: pytest.MonkeyPatch, wanted: float, max_parallel: int, at_once: int
) -> None:
    monkeypatch.setattr(StageResources, "cpus_wanted", lambda self: wanted)
    doubles = {f"d{n}": {"factor": n, "seconds": 0.3} for n in (2, 3, 4)}
    go(branches(state, RunConfig(max_parallel=max_parallel), cpus=4, **doubles))
    assert most_at_once(state) == at_once
    assert executions(state).count("double") == 3  # a step that wants more than there is runs alone


def test_one_worker_runs_one_stage_after_another_and_is_gone_with_the_session(state: Path) -> None:
    doubles = {f"d{n}": {"factor": n} for n in (2, 3, 4)}
    go(branches(state, RunConfig(max_parallel=1), **doubles))
    processes = {pid for _, _, _, pid in events(state)}
    assert len(processes) == 1 and not psutil.pid_exists(processes.pop())


@pytest.mark.parametrize("trouble", ["die", "passing", "crash"])
def test_a_failure_that_may_pass_is_tried_again_with_a_doubled_wait_and_a_run_of_its_own(
    state: Path, trouble: str, capsys: pytest.CaptureFixture[str]
) -> None:
    resources = StageResources(retries=2, retry_wait_s=0.3)
    go(app_of(state, double={"trouble": trouble, "troubled": 2, "resources": resources}))
    assert executions(state) == ["make", "double", "double", "double", "judge"]
    found = [(r.data.tags["raykeel.attempt"], r.info.status) for r in children(state)]
    assert sorted(found) == [("1", "FAILED"), ("2", "FAILED"), ("3", "FINISHED")]
    first, second, third = [at for _, event, at, _ in events(state) if event == "begin"]
    assert second - first >= 0.3 and third - second >= 0.6
    printed = capsys.readouterr().out
    assert "attempt 2 of 3 in 0.3 s" in printed and "attempt 3 of 3 in 0.6 s" in printed
    assert list((state / "store" / "staging").iterdir()) == []


def test_work_stays_between_attempts_and_retries_end(state: Path) -> None:
    resources = StageResources(retries=1, retry_wait_s=0.1)
    with pytest.raises(
        MayPass, match=r"double: its process was killed by signal 9; its last words are in .*worker-\d\.log"
    ):
        go(app_of(state, double={"trouble": "die", "resources": resources}))
    assert executions(state) == ["make", "double", "double"]
    assert [p.read_text() for p in (state / "store" / "work").glob("*/resumable")] == ["kept"]


@pytest.mark.parametrize(("trouble", "kind"), [("user", StageError), ("gate", GateRefused)])
def test_what_data_or_a_gate_said_is_not_tried_again(state: Path, trouble: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        go(app_of(state, double={"trouble": trouble, "resources": StageResources(retries=3, retry_wait_s=0.1)}))
    assert executions(state) == ["make", "double"]


def test_a_stage_over_its_time_is_interrupted_and_the_message_names_the_field(state: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(MayPass, match=r"double: not done after 0\.5 s.*stages\.double\.resources\.timeout_s"):
        go(app_of(state, double={"trouble": "careful", "resources": StageResources(timeout_s=0.5)}))
    assert time.monotonic() - begun < 8
    assert (state / "cleaned-up").exists()
    assert set(published(state)) == {"make"}
    assert [r.info.status for r in children(state)] == ["FAILED"]


@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_after_a_failure_what_runs_is_finished_and_the_rest_depends_on_on_failure(
    state: Path, on_failure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app = branches(
        state,
        RunConfig(on_failure=OnFailure[on_failure], max_parallel=2),
        bad={"trouble": "user"},
        slow={"factor": 3, "seconds": 1.0},
        late={"factor": 4},
    )
    app.stages["judged"] = JudgeConfig(inputs={"corpus": "bad"})
    app.stages["fine"] = JudgeConfig(inputs={"corpus": "slow"})
    with pytest.raises(StageError, match=r"rows\.jsonl:3: broken"):
        go(app)
    names = {name for name, event, _, _ in events(state) if event == "end"}
    assert names == ({"x3"} if on_failure == "stop" else {"x3", "x4"})
    assert executions(state).count("judge") == (0 if on_failure == "stop" else 1)
    printed = capsys.readouterr().out
    assert "- judged   skipped: bad failed" in printed
    assert ("- late     not started" in printed) is (on_failure == "stop")


def test_all_failures_are_told_and_the_first_decides(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go(branches(state))
    app = branches(
        state,
        RunConfig(on_failure=OnFailure["continue"], max_parallel=1),
        first={"trouble": "gate"},
        second={"factor": 3, "trouble": "user"},
    )
    with pytest.raises(GateRefused):
        go(app)
    assert "second failed too: rows.jsonl:3: broken" in capsys.readouterr().err


def test_silence_is_explained_and_ends_at_its_limit(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunConfig(quiet_after_s=0.4, stall_limit_s=1.5)
    with pytest.raises(MayPass, match=r"double: no sign of it for 1\.5 s \(run\.stall_limit_s=1\.5\)"):
        go(app_of(state, run=run, double={"seconds": 8.0}))
    assert "double  nothing heard for 0 s: it says nothing" in capsys.readouterr().out


@pytest.mark.ray
@pytest.mark.slow
def test_a_ray_stage_that_nothing_moves_for_is_told_demand_and_supply_and_leaves_no_ray(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def app(cpus: int) -> AppConfig:
        ephemeral = ClusterConfig(mode=ClusterMode.ephemeral, num_cpus=2, object_store_mb=100)
        run = RunConfig(quiet_after_s=3.0, stall_limit_s=12.0)
        return AppConfig(
            name="stub", state=str(state), run=run, cluster=ephemeral, stages={"ask": AskConfig(cpus=cpus)}
        )

    go(app(1))
    before = {p.pid for p in psutil.process_iter()}
    with pytest.raises(
        MayPass, match=r"stall_limit_s=12\): waits for 1 x \{64 CPU\}; the cluster has 2 CPU \(2 free\)"
    ):
        go(app(64))
    assert "nothing heard for 3 s: waits for 1 x {64 CPU}; the cluster has 2 CPU (2 free)" in capsys.readouterr().out
    left = [p for p in psutil.process_iter() if p.pid not in before and "ray" in " ".join(p.cmdline())]
    assert left == []
    assert len({pid for _, _, _, pid in events(state)}) == 2 and not list((state / "cluster").glob("ephemeral-*"))


def test_a_stopped_process_is_told_from_one_that_waits(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pipelines import watch

    class Silent:
        def send(self, *message: Any) -> None: ...

    class Held:
        lost = stopping = type("Unset", (), {"is_set": staticmethod(lambda: False)})

    told: list[str] = []
    held: Any = Held()
    silent: Any = Silent()
    seen = watch.Watch("train", 60.0, RunConfig(quiet_after_s=1.0), silent, held, held, told.append)
    seen(1.1)
    seen._asked = time.monotonic() - watch.ANSWER_S - 1
    seen(1.3)
    assert told == ["nothing heard for 1 s: its process does not answer"]


@pytest.mark.slow
def test_a_result_that_another_run_took_over_is_not_published(state: Path) -> None:
    store = Store.open(app_of(state))

    def take_over() -> None:
        """What a successor does that believes us dead."""
        while not (begun := [e for e in events(state) if e[1] == "begin"]):
            time.sleep(0.05)
        os.kill(begun[0][3], 0)  # the control: the stage runs
        for fingerprint in store.bucket.children("results"):
            slots = Slots.of(store.bucket, fingerprint)
            if slots.holder() is not None:
                store.bucket.create(
                    f"results/{fingerprint}/{slots.newest:06d}.json", b'{"sealed": "taken over by a test"}'
                )

    import threading

    thief = threading.Thread(target=take_over)
    thief.start()
    with pytest.raises(LeaseLost):
        go(app_of(state, double={"seconds": 12.0}))
    thief.join()
    assert set(published(state)) == {"make"}
    assert [e for e in events(state) if e[1] == "end"] == []  # stopped as soon as it was known, not at the end


def test_a_clock_that_goes_backwards_gives_no_negative_duration(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600.0 * len(executions(state)))
    outcome = go(app_of(state, double={"seconds": 0.2}))
    assert time.time() < real() - 10_000  # the control
    seconds = {s.name: s.record.meta["seconds"] for s in outcome.steps if s.record}
    assert all(0 <= value < 30 for value in seconds.values()) and seconds["double"] >= 0.2
    monkeypatch.undo()
    assert all(r.info.end_time >= r.info.start_time for r in runs(state))
    go(app_of(state, double={"seconds": 0.2}))
    assert executions(state) == ["make", "double", "judge"]


def test_a_worker_that_somebody_killed_while_it_was_idle_is_replaced(state: Path) -> None:
    app = app_of(state)
    with Session(app, Console()) as opened:
        opened.pool.warm_up()
        idle = opened.pool.take(None)
        opened.pool.give_back(idle)
        os.kill(idle.pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while not idle.is_gone() and time.monotonic() < deadline:
            time.sleep(0.01)
        runner.run(app, opened, "make run")
    assert executions(state) == ["make", "double", "judge"]


def job_of(state: Path, **values: Any) -> Job:
    """`double` alone, as an attempt asks a worker for it."""
    app = app_of(state)
    store = Store.open(app)
    staged, work = store.staging_directory("f" * 64), store.work("f" * 64)
    for path in (staged, work):
        path.mkdir(parents=True)
    made = Rows(uri=(state / "made").as_uri())
    Rows.write(state / "made", {"value": 1, "rows": 1})
    return Job(
        name="double",
        cfg=DoubleConfig(**values),
        inputs={"rows": made},
        app=replace(app, stages={}),
        fingerprint="f" * 64,
        staged=staged,
        work=work,
        ray=None,
    )


def test_what_a_failed_stage_left_running_ends_with_its_worker_also_when_that_is_gone_already(state: Path) -> None:
    (state / "made").mkdir()
    worker = WorkerProcess(1, state / "logs")
    worker.start(job_of(state, trouble="leftover"))
    while (worker.receive(5.0) or ("",))[0] != "failed":
        pass
    deadline = time.monotonic() + 10
    while not worker.is_gone() and time.monotonic() < deadline:
        time.sleep(0.01)
    child = int((state / "child").read_text())
    assert worker.is_gone() and psutil.pid_exists(child)  # the control
    worker.stop(1.0)
    assert gone(child, 2.0)


def test_a_result_in_hand_is_not_given_up(state: Path) -> None:
    """Whatever would have ended the attempt came too late."""
    (state / "made").mkdir()
    worker = WorkerProcess(1, state / "logs")
    heard: list[str] = []

    def hear(kind: str, *_: Any) -> None:
        heard.append(kind)
        if kind == "made":
            time.sleep(1.5)  # the deposit is on its way meanwhile

    def watch(silence_s: float) -> None:
        if "made" in heard:
            raise MayPass("too long")

    try:
        assert converse(worker, job_of(state), hear, watch).digest
    finally:
        worker.kill()


def test_a_store_that_goes_away_after_the_commit_fails_and_repeats_nothing(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, refused = Bucket.get, []

    def get(self: Bucket, key: str) -> bytes | None:
        if key.startswith("objects/") and key.endswith("/summary.json"):  # read for MLflow, behind the commit
            refused.append(key)
            raise BucketError(f"{key}: the store is away")
        return real(self, key)

    monkeypatch.setattr(Bucket, "get", get)
    go(app_of(state, double={"resources": StageResources(retries=2, retry_wait_s=0.1)}))
    assert (
        executions(state) == ["make", "double", "judge"]
        and set(published(state)) == set(executions(state))
        and len(refused) == 4  # each stage's own, and the report's first
    )
    assert {r.info.status for r in runs(state)} == {"FINISHED"}
    assert "double is published; its MLflow run does not show all of it: objects/" in capsys.readouterr().err


def test_a_commit_whose_answer_is_lost_costs_no_second_attempt(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, lost = Bucket.create, []

    def create(self: Bucket, key: str, data: bytes) -> bool:
        done = real(self, key, data)
        if not lost and b'"payload"' in data:
            lost.append(key)
            raise BucketError(f"{key}: the answer was lost")
        return done

    monkeypatch.setattr(Bucket, "create", create)
    go(app_of(state))
    assert lost and executions(state) == ["make", "double", "judge"]
    assert {r.info.status for r in runs(state)} == {"FINISHED"}
    assert "not published yet, again in 1 s" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("stopped", ["driver", "both"])
def test_a_driver_that_stood_still_longer_than_the_stall_limit_takes_its_own_silence_for_nobodys(
    state: Path, stopped: str
) -> None:
    run = "RunConfig(stall_limit_s=1.5, quiet_after_s=0.7)"
    script = SCRIPT.replace("'seconds': 60.0}", "'seconds': 2.5}, run=" + run).replace(
        "import sys;", "import sys; from pipelines.config import RunConfig;"
    )
    driver, worker = started(state, "talk", script)
    frozen = [driver.pid, *([worker] if stopped == "both" else [])]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3.5)
    assert set(published(state)) == {"make"}  # the control: nobody has published for it
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
    assert driver.wait(timeout=30) == 0 and executions(state) == ["make", "double", "judge"]


SCRIPT = (
    "import sys; from pathlib import Path; from pipelines.__main__ import _verdict; from pipelines import session\n"
    "from tests.pipelines.test_runner import app_of, go\n"
    "try:\n"
    "    with session.signals(): go(app_of(Path(sys.argv[1]), double={'trouble': sys.argv[2], 'seconds': 60.0}))\n"
    "except BaseException as error: sys.exit(_verdict(error)[0])"
)


def started(state: Path, trouble: str, script: str = SCRIPT) -> tuple["subprocess.Popen[bytes]", int]:
    """A driver whose `double` has begun, and the process that runs it."""
    driver = subprocess.Popen([sys.executable, "-c", script, str(state), trouble], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not events(state):
        assert driver.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    worker = events(state)[0][3]
    assert psutil.pid_exists(worker)  # the control: there is something to leave behind
    return driver, worker


def gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not psutil.pid_exists(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_first_signal_lets_the_stage_clean_up_and_leaves_nothing(state: Path, number: signal.Signals) -> None:
    driver, worker = started(state, "careful")
    begun = time.monotonic()
    driver.send_signal(number)
    assert driver.wait(timeout=15) == 128 + number
    assert time.monotonic() - begun < 5  # a stage that obeys costs no grace
    assert (state / "cleaned-up").exists() and gone(worker, 0.5)
    assert {r.info.status for r in runs(state)} == {"FINISHED", "KILLED"}
    assert list((state / "store" / "staging").iterdir()) == []
    store = Store.open(app_of(state))
    assert all(Slots.of(store.bucket, f).holder() is None for f in store.bucket.children("results"))


@pytest.mark.slow
def test_a_second_signal_ends_driver_and_worker_at_once(state: Path) -> None:
    driver, worker = started(state, "stubborn")
    driver.send_signal(signal.SIGTERM)
    time.sleep(1.0)
    assert driver.poll() is None  # the control: the first one still waits for the stage
    begun = time.monotonic()
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(timeout=10) == 143 and gone(worker, 3.0)
    assert time.monotonic() - begun < 3


@pytest.mark.slow
@pytest.mark.faults
def test_a_stage_that_ignores_the_first_signal_is_killed_within_15_seconds(state: Path) -> None:
    driver, worker = started(state, "stubborn")
    begun = time.monotonic()
    driver.send_signal(signal.SIGINT)
    assert driver.wait(timeout=20) == 130 and time.monotonic() - begun < 15 and gone(worker, 0.5)
    assert {r.info.status for r in runs(state)} == {"FINISHED", "KILLED"}


@pytest.mark.faults
def test_a_killed_driver_leaves_no_worker_and_no_child_of_one(state: Path) -> None:
    driver, worker = started(state, "stubborn")
    driver.kill()
    driver.wait()
    assert gone(worker, 3.0)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("point", ["before-start", "before-commit", "after-commit", "after-close"])
def test_the_kill_hook_kills_where_it_says(state: Path, point: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(state), ""],
        env={**os.environ, "RAYKEEL_KILL_AT": f"make:{point}"},
        stderr=subprocess.DEVNULL,
        timeout=60,
    )
    assert run.returncode == -signal.SIGKILL
    assert set(published(state)) == ({"make"} if point.startswith("after") else set())
    assert executions(state) == ([] if point == "before-start" else ["make"])
    statuses = {r.data.tags["mlflow.runName"].split()[0]: r.info.status for r in runs(state)}
    # Closing is sent by a thread: after-close it may or may not have arrived, and the next run makes it true.
    assert statuses["stub"] == "RUNNING" and ("make" in statuses) is (point != "before-start")


def test_resources_refuse_impossible_values() -> None:
    for values, message in (
        ({"retries": -1}, "resources.retries must be 0 or more, got -1"),
        ({"retry_wait_s": 0}, "resources.retry_wait_s must be above 0, got 0"),
        ({"timeout_s": 0}, "resources.timeout_s must be above 0, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            StubResources(**values)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"run\.max_parallel must be >= 1, got 0"):
        RunConfig(max_parallel=0)
    with pytest.raises(ValueError, match=r"run\.stall_limit_s must be above 0, got 0"):
        RunConfig(stall_limit_s=0)


def test_only_what_another_attempt_can_change_may_pass() -> None:
    assert runner.may_pass(MayPass("died")) and runner.may_pass(OSError()) and runner.may_pass(KeyError())
    assert not runner.may_pass(StageError("no")) and not runner.may_pass(LeaseLost("no"))


def test_what_a_stage_says_reaches_its_record_and_its_log_file_but_not_the_console(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyError) as raised:
        go(app_of(state, double={"trouble": "crash"}))
    assert "in the worker process" in "".join(raised.value.__notes__) and "stubs.py" in raised.value.__notes__[0]
    assert "KeyError: 'a bug'" in (state / "logs" / "worker-1.log").read_text()
    assert "Traceback" not in "".join(capsys.readouterr())
    outcome = go(app_of(state))
    record = outcome.steps[1].record
    assert record is not None and [list(point) for point in record.meta["curves"]["loss"]] == [[0, 3], [1, 2], [2, 1]]
    assert client(state).get_run(str(outcome.run_id)).info.status == "FINISHED"


def test_a_driver_and_a_worker_that_need_no_ray_import_none(state: Path) -> None:
    """The worker says what its process has loaded when `double` begins."""
    script = (
        "import sys; from pathlib import Path; from tests.pipelines.test_runner import app_of, go\n"
        "go(app_of(Path(sys.argv[1]), double={'trouble': 'modules'}))\n"
        "print('LOADED', sorted({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script, str(state)], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "LOADED []"
    worker = set((state / "modules").read_text().split())
    assert not worker & {"ray", "torch", "transformers", "mlflow", "pandas", "pyarrow", "hydra", "omegaconf"}
