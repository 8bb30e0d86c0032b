"""Ctrl-C, SIGTERM and SIGHUP: to the driver alone and to its process group, once and twice, and through make."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.config import ROOT
from tests.faults.project import Project, gone
from tests.faults.stages import STAGES

pytestmark = [pytest.mark.faults, pytest.mark.slow]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def started(
    project: Project, stage: str, mood: str, command: list[str] | None = None
) -> tuple["subprocess.Popen[str]", list[int]]:
    """A driver whose stage waits, and the processes that must not outlive it: worker and the worker's child."""
    process = project.start(faults={"hold": {stage: "/nowhere"}, "mood": {stage: mood}}, command=command)
    project.await_event(f"{stage} begin", process)
    deadline = time.monotonic() + 30
    while not (children := project.events(f"{stage} child")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    family = [project.events(f"{stage} begin")[0][1], children[0][1]]
    assert not any(gone(pid, 0.0) for pid in family)  # the control: there is something to leave behind
    return process, family


def send(process: "subprocess.Popen[str]", number: int, whom: str) -> None:
    (os.killpg if whom == "group" else os.kill)(process.pid, number)


def require_nothing_left(project: Project, stage: str, family: list[int]) -> None:
    assert all(gone(pid, 1.0) for pid in family)
    assert set(project.published) == set(STAGES[: STAGES.index(stage)])
    project.require_sound()
    assert project.statuses(stage) == ["KILLED"] and project.statuses("faults") == ["KILLED"]
    assert project.statuses(STAGES[0]) == (["KILLED"] if stage == STAGES[0] else ["FINISHED"])


@pytest.mark.parametrize("number", SIGNALS, ids=lambda n: signal.Signals(n).name)
@pytest.mark.parametrize("whom", ["group", "parent"])
def test_one_signal_ends_a_run_in_order(project: Project, number: int, whom: str) -> None:
    process, family = started(project, "expand", "")
    begun = time.monotonic()
    send(process, number, whom)
    said, _ = process.communicate(timeout=20)
    assert time.monotonic() - begun < 15 and process.returncode == 128 + number, said
    assert "what was published stays" in said and "Traceback" not in said
    assert project.events("expand cleaned-up")  # it was asked, not killed
    project.require_tidy()
    require_nothing_left(project, "expand", family)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda n: signal.Signals(n).name)
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "expand"])
def test_it_is_the_same_in_every_stage(project: Project, stage: str, number: int) -> None:
    process, family = started(project, stage, "")
    process.send_signal(number)
    assert process.wait(timeout=15) == 128 + number
    project.require_tidy()
    require_nothing_left(project, stage, family)


def test_a_stage_that_does_not_listen_is_killed_in_time(project: Project) -> None:
    process, family = started(project, "expand", "stubborn")
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130 and 5 < time.monotonic() - begun < 15
    assert not project.events("expand cleaned-up")  # the control: it did not listen
    project.require_tidy()
    require_nothing_left(project, "expand", family)


@pytest.mark.parametrize(
    ("number", "whom"),
    [(signal.SIGINT, "group"), *((number, "parent") for number in SIGNALS)],
    ids=lambda value: signal.Signals(value).name if isinstance(value, int) else value,
)
def test_a_second_signal_ends_everything_at_once(project: Project, number: int, whom: str) -> None:
    process, family = started(project, "expand", "stubborn")
    send(process, number, whom)
    time.sleep(1.0)
    assert process.poll() is None  # the control: the first one still waits for the stage
    begun = time.monotonic()
    send(process, number, whom)
    assert process.wait(timeout=10) == 128 + number and time.monotonic() - begun < 3
    assert all(gone(pid, 1.0) for pid in family)
    assert set(project.published) == {"gather"}
    project.require_sound()
    if whom == "parent":
        return
    # Nobody had time to tidy up; the next run does, and waits for no lease.
    project.run()
    assert project.executions == ["gather", "expand", "expand", "weigh", "enlist"]
    project.require_tidy()
    assert "RUNNING" not in [status for _, status, _ in project.runs()]


@pytest.fixture
def make(project: Project, tmp_path: Path) -> list[str]:
    """`make run` of this repository on this interpreter, with the stages of this directory."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    ready = tmp_path / "ready"
    ready.touch()  # newer than everything that setup depends on
    tool = f"{sys.executable} -m tests.faults.command"
    words = project.command()[project.command().index("run") + 1 :]
    project.env |= {
        "CONF": str(project.conf),
        "MAKEFLAGS": "",
    }  # the words of a make around the tests are not for this one
    overrides = [word for word in words if "=" in word]
    return ["make", "-C", str(ROOT), "--no-print-directory", "run", f"READY={ready}", f"RAYKEEL={tool}", *overrides]


@pytest.mark.parametrize(
    ("number", "whom"),
    [(signal.SIGINT, "group"), (signal.SIGHUP, "group"), (signal.SIGTERM, "parent")],
    ids=lambda value: signal.Signals(value).name if isinstance(value, int) else value,
)
def test_make_passes_a_signal_on_and_reports_failure(project: Project, make: list[str], number: int, whom: str) -> None:
    """A terminal signals the group. A supervisor signals make alone: SIGTERM, which make hands on (SIGINT it would not)."""
    process, family = started(project, "expand", "", make)
    begun = time.monotonic()
    send(process, number, whom)
    process.communicate(timeout=20)  # until the driver, too, has let go of the pipe
    assert process.returncode not in (0, None)
    assert time.monotonic() - begun < 15
    project.require_tidy()
    require_nothing_left(project, "expand", family)


def test_make_reports_success_and_failure(project: Project, make: list[str]) -> None:
    done = project.start("", command=make)
    said, _ = done.communicate(timeout=120)
    assert done.returncode == 0 and "4 of 4 stages ran" in said, said
    failed = project.start(command=[*make, "stages.gather.valu=1"])
    said, _ = failed.communicate(timeout=60)
    assert failed.returncode == 2 and "stages.gather.valu" in said and "Error 1" in said, said
