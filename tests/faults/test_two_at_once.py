"""Two runs that want the same result: one makes it, the other takes it; and a holder that stands still and wakes up too late."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from pipelines.lease import identity
from tests.faults.project import Project
from tests.faults.stages import STAGES

pytestmark = [pytest.mark.faults, pytest.mark.slow]

QUIET = {"quiet": True}
FAST = [0.2, 1.5, 0.1]
"""Heartbeat, dead after, look again (seconds): a tenth of what holds outside of tests."""


def test_the_same_command_twice_at_once_executes_each_stage_once(
    project: Project, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    first = project.start(faults={"hold": {"gather": str(go)}})
    project.await_event("gather begin", first)
    second = project.start()
    with first, second:
        await_runs(project, second, 2)
        go.touch()
        outputs = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert "made by another run meanwhile" in "".join(outputs)  # the control: both were there at the same time
    assert sorted(project.executions) == sorted(STAGES)
    assert project.published == undisturbed and project.versions() == [(1, undisturbed["expand"])]
    project.require_sound()
    project.require_tidy()
    # Nobody claims in MLflow to have made what the other one made.
    assert {name: project.statuses(name) for name in STAGES} == {name: ["FINISHED"] for name in STAGES}
    assert project.statuses("faults") == ["FINISHED", "FINISHED"]


def test_two_configs_that_share_a_stage_make_it_once(project: Project, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first = project.start("run.until=weigh", faults={**QUIET, "hold": {"gather": str(go)}})
    project.await_event("gather begin", first)
    second = project.start("run.until=weigh", "stages.expand.factor=3", faults=QUIET)
    with first, second:
        await_runs(project, second, 2)
        go.touch()
        said = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], said
    assert "made by another run meanwhile" in "".join(said)  # the control
    assert sorted(project.executions) == ["expand", "expand", "gather", "weigh", "weigh"]
    values = sorted(
        int(json.loads(_summary(project, r.digest))["metrics"]["value"]) for r in _records(project, "weigh")
    )
    assert values == [2, 3]
    project.require_sound()
    project.require_tidy()


def test_a_killed_holder_of_this_host_is_replaced_at_once(project: Project, undisturbed: dict[str, str]) -> None:
    """Although it was killed with its own worker, and with the waiting times that hold outside of tests."""
    holder = project.start("run.until=gather", faults={**QUIET, "hold": {"gather": "/nowhere"}})
    worker = project.await_event("gather begin", holder)
    waiter = project.start("run.until=gather", faults=QUIET)
    with holder, waiter:
        await_runs(project, waiter, 2)
        time.sleep(1.5)  # it has looked at least once
        killed = time.monotonic()
        os.kill(holder.pid, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        holder.wait()
        assert waiter.wait(timeout=60) == 0
    again = project.events("gather begin")[1][2]
    assert again - killed < 5.0  # one look a second, and a worker's start
    assert project.published == {"gather": undisturbed["gather"]}
    project.store.sweep_staging()  # the waiter had swept when the holder still lived; the next run does
    project.require_tidy()


def test_a_holder_of_another_host_is_replaced_within_30_seconds_of_its_last_beat(
    project: Project, undisturbed: dict[str, str]
) -> None:
    """With the waiting times that hold outside of tests."""
    die = {"stage": "gather", "point": "part", "count": 1, "who": "machine"}
    project.run("run.until=gather", faults={**QUIET, "host": "another", "die": die}, expect=-signal.SIGKILL)
    begun = time.monotonic()
    said = project.run("run.until=gather", faults=QUIET)
    assert "on another is making this; waiting" in said  # the control: it could not know at once
    again = project.events("gather begin")[1][2]
    assert 15 < again - begun < 30
    assert project.published == {"gather": undisturbed["gather"]}


def test_a_holder_of_another_host_whose_heart_beats_is_waited_for_and_the_limit_is_kept(project: Project) -> None:
    beating = project.start(
        "run.until=gather", faults={**QUIET, "host": "another", "lease": FAST, "hold": {"gather": "/nowhere"}}
    )
    project.await_event("gather begin", beating)
    try:
        said = project.run("run.until=gather", "run.lease_timeout_s=4", faults={**QUIET, "lease": FAST}, expect=5)
        assert "on another has been making" in said and "run.lease_timeout_s" in said
        assert project.executions == ["gather"]
    finally:
        beating.send_signal(signal.SIGTERM)
        assert beating.wait(timeout=20) == 143
    project.require_tidy()


@pytest.mark.parametrize("stored", ["directory", "s3"], indirect=True)
def test_a_holder_that_stood_still_cannot_publish_after_its_successor(stored: Project, tmp_path: Path) -> None:
    """A laptop that slept: everything of it stops, its result is taken over, and then it goes on as if nothing had happened."""
    go = tmp_path / "go"
    sleeper = stored.start(
        "run.until=gather", faults={**QUIET, "host": "laptop", "lease": [0.2, 1.5, 0.1], "hold": {"gather": str(go)}}
    )
    worker = stored.await_event("gather begin", sleeper)
    stored.store.bucket.get("x")  # opens the client while nothing is at stake
    time.sleep(1.0)  # some heartbeats
    os.kill(sleeper.pid, signal.SIGSTOP)
    go.touch()
    deadline = time.monotonic() + 30
    while not stored.store.bucket.children(
        "objects"
    ):  # its worker, still awake, deposits an object that no record names
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(worker, signal.SIGSTOP)
    assert stored.published == {}  # the control: it has made everything but the record
    stored.run("run.until=gather", faults={**QUIET, "lease": FAST})
    successor = stored.store.find(_records(stored, "gather")[0].fingerprint)[0]
    assert successor is not None and successor.fence == 2
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGCONT)
    os.kill(sleeper.pid, signal.SIGCONT)
    said, _ = sleeper.communicate(timeout=60)
    assert sleeper.returncode == 6 and "took" in said, said
    assert stored.store.find(successor.fingerprint)[0] == successor
    assert stored.executions == ["gather", "gather"]
    stored.require_sound()
    stored.require_tidy()


def test_a_lease_left_by_a_process_of_another_boot_is_taken_over_at_once(project: Project) -> None:
    """After a power cut the pid may belong to anybody: the lease names the boot, too."""
    project.run("run.until=gather", faults=QUIET)
    fingerprint = _records(project, "gather")[0].fingerprint
    lease = {**identity(), "started": "4242 after boot 00000000", "fence": 2}
    project.store.bucket.create(f"results/{fingerprint}/000002.lease.json", json.dumps(lease).encode())
    begun = time.monotonic()
    project.run("run.until=gather", "run.rerun=[gather]", faults=QUIET)
    assert time.monotonic() - begun < 15 and _records(project, "gather")[0].fence == 3


def await_runs(project: Project, process: "subprocess.Popen[str]", count: int) -> None:
    """Until so many runs have entered the ledger: what they have planned, they make or wait for."""
    deadline = time.monotonic() + 60
    while len(project.store.runs("faults")) < count:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def _records(project: Project, stage: str) -> list:  # type: ignore[type-arg]
    return [record for record in project.store.records() if record.payload["stage"] == stage]


def _summary(project: Project, digest: str) -> bytes:
    return project.store.bucket.get(f"objects/{digest}/summary.json") or b""
