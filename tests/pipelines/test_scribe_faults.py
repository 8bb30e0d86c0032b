"""What goes wrong around the process that keeps MLflow open: it is paused, forgotten, left over, impersonated; a lock that is not
given back; many runs. A database that another holds for a minute: `test_tracking_faults.py`. Each test shows that its fault happened."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from pipelines import conversation, scribe
from pipelines import desk as desks
from pipelines.config import ROOT
from pipelines.dictation import Dictation
from stages.artifacts import Checkpoint
from stages.contract import ResourcesUnavailable
from tests.pipelines.scribed import await_, client, command, desk_of, ended, runs
from tests.pipelines.stubs import executions

STRANGER = 54321
as_root = pytest.mark.skipif(os.getuid() != 0, reason="makes files of another user")


@pytest.mark.slow
def test_a_paused_scribe_is_replaced_within_seconds_and_nothing_is_missing(bare: Path) -> None:
    store = Dictation(desk_of(bare), "stub")
    parent = store.start_parent("parent", {})
    for number in range(2):
        (one,) = desks.running(bare)
        os.kill(one["pid"], signal.SIGSTOP)
        begun = time.monotonic()
        parent.log_metrics({"loss": 1.0}, number)
        parent.log_text("x" * 2**21, f"{number}.txt")  # more than a socket takes before somebody reads
        child = store.start_child(parent, f"child{number}", {})  # a stage begins
        registry = store.registry(child)
        assert registry.register("m", Checkpoint("file:///w", f"{number}" * 64), {}, {}) == number + 1
        registry.close()
        child.close("FINISHED")
        assert time.monotonic() - begun < 15
        assert ended(one["pid"])  # the control: the paused one served nobody
    (one,) = desks.running(bare)
    os.kill(one["pid"], signal.SIGSTOP)
    begun = time.monotonic()
    parent.close("FINISHED")  # and at the end of the run
    assert time.monotonic() - begun < 15 and parent.failed is None
    store.close()
    found = runs(bare)
    assert {name: run.info.status for name, run in found.items()} == dict.fromkeys(
        ["parent", "child0", "child1"], "FINISHED"
    )
    history = client(bare).get_metric_history(found["parent"].info.run_id, "loss")
    assert sorted(point.step for point in history) == [0, 1]
    assert len(client(bare).list_artifacts(found["parent"].info.run_id)) == 2


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_is_for_the_run_and_not_for_the_scribe(bare: Path) -> None:
    run = command(bare, "run", "pipeline=stub", "stages.double.seconds=60", own_group=True)
    await_(lambda: executions(bare) == ["make", "double"], 60)
    (one,) = desks.running(bare)
    os.killpg(run.pid, signal.SIGINT)
    said = run.communicate(timeout=30)[0]
    assert run.returncode == 130, said
    assert os.getsid(one["pid"]) == one["pid"] and not ended(one["pid"])
    assert {run.info.status for run in runs(bare).values()} == {"KILLED", "FINISHED"}


@pytest.mark.slow
def test_what_killed_scribes_leave_is_swept_away_by_the_next_one(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = []
    for rights in ("a", "b"):  # as with a token that is renewed each hour
        monkeypatch.setenv("AWS_SESSION_TOKEN", rights)
        Dictation(desk_of(bare), "stub").close()
        one = next(one for one in desks.running(bare) if one not in left)
        left.append(one)
        os.kill(one["pid"], signal.SIGKILL)
        await_(lambda: ended(left[-1]["pid"]))
    assert Path(left[-1]["socket"]).exists()  # the control
    monkeypatch.setenv("AWS_SESSION_TOKEN", "c")
    Dictation(desk_of(bare), "stub").close()
    assert not [one for one in left if Path(one["socket"]).parent.exists()]
    assert list(desk_of(bare).records.glob("*.json")) == [desk_of(bare).record]


@pytest.mark.slow
def test_a_scribe_that_nobody_can_find_any_more_serves_those_it_has_and_ends(bare: Path) -> None:
    store = Dictation(desk_of(bare), "stub")
    run = store.start_parent("first", {})
    (one,) = desks.running(bare)
    desk_of(bare).record.unlink()
    time.sleep(1.5)
    assert not ended(one["pid"])  # the control: it is still needed
    run.log_metrics({"loss": 1.0}, 0)
    run.close("FINISHED")
    store.close()
    await_(lambda: ended(one["pid"]), 5)
    assert run.failed is None and runs(bare)["first"].data.metrics == {"loss": 1.0}


@pytest.mark.slow
@as_root
def test_a_socket_that_another_user_made_in_the_place_of_a_dead_scribes_is_told_nothing(
    bare: Path, tmp_path: Path
) -> None:
    Dictation(desk_of(bare), "stub").close()
    (one,) = desks.running(bare)
    os.kill(one["pid"], signal.SIGKILL)
    await_(lambda: ended(one["pid"]))
    place, heard = Path(one["socket"]), []
    place.unlink()
    os.chown(place.parent, STRANGER, STRANGER)  # /tmp was emptied by a restart, and somebody was faster
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trap:
        trap.bind(str(place))
        trap.listen()
        trap.settimeout(0.2)

        def listen() -> None:
            while trap.fileno() != -1:
                try:
                    connection, _ = trap.accept()
                except OSError:
                    continue
                heard.append(connection.recv(1000))
                connection.close()

        threading.Thread(target=listen, daemon=True).start()
        Dictation(desk_of(bare), "stub").close()
        time.sleep(0.3)
    place.unlink(missing_ok=True)
    place.parent.rmdir()
    assert heard == []


@as_root
def test_a_user_without_a_home_has_rights_all_the_same() -> None:
    script = f"import os; from pathlib import Path; from pipelines import desk; os.setuid({STRANGER}); print(desk.rights()); Path.home()"
    environ = {name: value for name, value in os.environ.items() if name not in ("HOME", "TMPDIR")}
    asked = [sys.executable, "-c", script]
    done = subprocess.run(asked, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    assert "home directory" in done.stderr  # the control
    assert len(done.stdout.strip()) == 64, done.stderr


def test_a_renewed_file_of_credentials_that_a_variable_names_makes_other_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "aws"
    secret.write_text("old")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(secret))
    before = desks.rights()
    assert desks.rights() == before
    secret.write_text("newer")
    assert desks.rights() != before


def test_what_a_dead_driver_left_is_sent_without_holding_up_the_stages_of_another(state: Path) -> None:
    desk = desk_of(state.parent / "other")
    (state.parent / "other").mkdir()
    (state / "mlflow").rename(state.parent / "other" / "mlflow")
    with scribe.here(desk) as served:
        store = Dictation(desk, "stub")
        parent = store.start_parent("parent", {})
        with (store.spool / "first-use.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # as another one that replays for long
            settling = threading.Thread(target=served.settle)
            settling.start()
            time.sleep(0.2)
            begun = time.monotonic()
            child = store.start_child(parent, "child", {})
            assert child.run_id is not None and time.monotonic() - begun < 2
            assert settling.is_alive()  # the control
        settling.join(timeout=20)
        child.close("FINISHED")
        parent.close("FINISHED")
        assert parent.failed is None
        store.close()


def test_a_driver_that_was_paused_while_it_started_a_scribe_does_not_hold_others_up_for_ever(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk_of(bare).records.mkdir(parents=True)
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    place = desk_of(bare).records / "lock"
    with subprocess.Popen([sys.executable, "-c", hold, str(place)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(desks, "ALONE_S", 1.0)
        with pytest.raises(ResourcesUnavailable, match="another run has been starting") as error:
            Dictation(desk_of(bare), "stub")
        assert str(place) in str(error.value)
        holder.kill()
    Dictation(desk_of(bare), "stub").close()


@pytest.mark.slow
def test_a_place_where_no_scribe_can_be_announced_is_named(bare: Path) -> None:
    desk_of(bare).records.write_text("in the way")
    with pytest.raises(ResourcesUnavailable, match=r"cannot be started .*scribes"):
        Dictation(desk_of(bare), "stub")


@pytest.mark.slow
def test_each_run_leaves_little_in_the_scribe(bare: Path) -> None:
    store = Dictation(desk_of(bare), "stub")
    (one,) = desks.running(bare)
    process = psutil.Process(one["pid"])

    def make(count: int) -> None:
        for number in range(count):
            parent = store.start_parent(f"run {number}", {})
            child = store.start_child(parent, "child", {})
            child.log_metrics({"loss": 1.0}, number)
            child._closing.set()  # nothing more is gathered
            child.log_text("hello", "note.txt")
            child.close("FINISHED")
            parent.close("FINISHED")
            assert parent.failed is None

    make(100)
    before, files, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
    make(200)
    assert process.memory_info().rss - before < 200 * 40e3  # 13 KB each, measured
    assert process.num_fds() <= files + 3 and process.num_threads() <= threads + 3
    store.close()
    assert conversation.log(desk_of(bare)).stat().st_size < 100_000
