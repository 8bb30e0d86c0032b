"""A clock that is set back an hour, between stages and inside one, and a machine that is taken to another time zone."""

import datetime
from pathlib import Path

import pytest

from tests.faults.project import Project
from tests.faults.stages import STAGES

pytestmark = [pytest.mark.faults, pytest.mark.slow]

HOUR = 3600.0


def require_sane_times(project: Project) -> None:
    """No duration is negative or an hour long, in our records, in the history and in MLflow."""
    for record in project.store.records():
        assert 0.0 <= record.meta["seconds"] < 600, (record.payload["stage"], record.meta["seconds"])
    for stage in project.published:
        recent = (project.store.last("faults", stage) or {})["recent"]
        assert all(0.0 <= execution["seconds"] < 600 for execution in recent)
    for name, status, run in project.runs():
        assert status != "RUNNING"
        assert 0 <= run.info.end_time - run.info.start_time < 600_000, name


def begun(project: Project, stage: str) -> datetime.datetime:
    (found,) = [r.meta["started_at"] for r in project.store.records() if r.payload["stage"] == stage]
    return datetime.datetime.fromisoformat(found)


def test_an_hour_back_inside_a_stage(project: Project, undisturbed: dict[str, str], tmp_path: Path) -> None:
    clock, go = tmp_path / "clock", tmp_path / "go"
    clock.write_text("0")
    faults = {"clock": str(clock), "hold": {"expand": str(go)}}
    process = project.start(faults=faults)
    project.await_event("expand begin", process)
    clock.write_text(str(-HOUR))  # in the driver and in its worker alike
    go.touch()
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    # The control: what began later has the earlier time.
    assert begun(project, "gather") - begun(project, "weigh") > datetime.timedelta(minutes=50)
    assert project.published == undisturbed
    require_sane_times(project)
    project.require_sound()
    project.require_tidy()
    clock.write_text("0")
    assert "0 of 4 stages to run" in project.run(faults={"clock": str(clock)})


def test_an_hour_back_between_stages_and_another_time_zone(
    project: Project, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    clock = tmp_path / "clock"
    clock.write_text("0")
    project.run("run.until=expand", faults={"clock": str(clock)})
    clock.write_text(str(-HOUR))
    project.run(faults={"clock": str(clock)})
    assert project.executions == list(STAGES)  # what was made "in the future" is reused
    assert begun(project, "expand") - begun(project, "weigh") > datetime.timedelta(minutes=50)  # the control
    # The same hour again, and again with a forced stage: identities of runs do not rest on the clock.
    project.run("run.rerun=[weigh]", faults={"clock": str(clock)})
    ids = [run["id"] for run in project.store.runs("faults")]
    assert len(ids) == len(set(ids)) == 3
    assert project.published == undisturbed
    require_sane_times(project)
    for zone in ("Pacific/Auckland", "America/Los_Angeles"):
        said = project.run(env={"TZ": zone})
        assert "0 of 4 stages to run" in said
    newest = [record.fence for record in project.store.records() if record.payload["stage"] == "weigh"]
    assert newest == [2]  # the later execution, although the clock says otherwise


def test_the_newest_checkpoint_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    import os

    import torch

    from stages.training import checkpoints

    for step in (9, 10):
        checkpoints.save(tmp_path, step, {"weight": torch.tensor([float(step)])})
    for step, at in ((9, 2_000_000_000), (10, 1_000_000_000)):
        for path in (tmp_path / f"step-{step:08d}", *(tmp_path / f"step-{step:08d}").iterdir()):
            os.utime(path, (at, at))
    oldest_first = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime)
    assert [path.name for path in oldest_first] == ["step-00000010", "step-00000009"]  # the control
    found = checkpoints.newest(tmp_path, print)
    assert found is not None and checkpoints.load(found)["weight"].item() == 10.0
