"""SIGKILL of the driver at every boundary of every stage: the same command again finishes the work, and nothing is done or told twice."""

import signal
import time
from pathlib import Path

import pytest

from pipelines import desk
from tests.faults.conftest import project_in
from tests.faults.project import Project
from tests.faults.stages import STAGES

pytestmark = [pytest.mark.faults, pytest.mark.slow]

POINTS = ("before-start", "before-commit", "after-commit", "after-close")
PATIENT_SCRIBE = {"RAYKEEL_SCRIBE_IDLE_S": "60"}
"""It is there still when the command is given again."""


@pytest.mark.parametrize("point", POINTS)
def test_the_same_command_again_finishes_what_a_killed_driver_left(
    tmp_path: Path, with_schema: Path, undisturbed: dict[str, str], point: str
) -> None:
    """In four projects side by side, one for each stage: nothing joins them."""
    projects = {stage: project_in(tmp_path / stage, with_schema) for stage in STAGES}
    try:
        killed = {
            stage: project.start(env={"RAYKEEL_KILL_AT": f"{stage}:{point}", **PATIENT_SCRIBE})
            for stage, project in projects.items()
        }
        for stage, project in projects.items():
            said, _ = killed[stage].communicate(timeout=120)
            assert killed[stage].returncode == -signal.SIGKILL, f"{stage}: exit {killed[stage].returncode}\n{said}"
            # The scribe lives, sees that nobody will say how the run ended, and says so.
            deadline = time.monotonic() + 15
            while "RUNNING" in [status for _, status, _ in project.runs()]:
                assert time.monotonic() < deadline, stage
                time.sleep(0.05)
            assert project.statuses("faults") == ["KILLED"], stage
            require_killed_there(project, stage, point)
        again = {stage: project.start() for stage, project in projects.items()}
        for stage, project in projects.items():
            said, _ = again[stage].communicate(timeout=120)
            assert again[stage].returncode == 0, f"{stage}: exit {again[stage].returncode}\n{said}"
            require_finished(project, undisturbed, stage, point)
    finally:
        for project in projects.values():
            desk.end(project.state)


@pytest.mark.parametrize("point", POINTS)
def test_what_a_lost_machine_left_running_is_closed_by_the_next_invocation(
    project: Project, undisturbed: dict[str, str], point: str
) -> None:
    """Driver and scribe die together; with the last stage published, the next invocation has nothing else to do."""
    project.run(
        env={"RAYKEEL_KILL_AT": f"enlist:{point}"}, faults={"scribe": str(project.state)}, expect=-signal.SIGKILL
    )
    assert project.statuses("faults") == ["RUNNING"] and not desk.running(project.state)  # the control
    require_killed_there(project, "enlist", point)
    project.run()
    require_finished(project, undisturbed, "enlist", point)


def require_killed_there(project: Project, stage: str, point: str) -> None:
    before = STAGES[: STAGES.index(stage)]
    # The control: it died exactly there.
    assert project.executions == [*before, *([stage] if point != "before-start" else [])]
    assert set(project.published) == {*before, *([stage] if point.startswith("after") else [])}
    project.require_sound()


def require_finished(project: Project, undisturbed: dict[str, str], stage: str, point: str) -> None:
    twice = [stage] if point == "before-commit" else []  # made, but never published
    assert sorted(project.executions) == sorted([*STAGES, *twice])
    assert project.published == undisturbed
    project.require_sound()
    project.require_tidy()
    told = project.runs()
    assert [name for name, status, _ in told if status == "RUNNING"] == []
    assert sorted(name for name, status, _ in told if status == "FINISHED" and name != "faults") == sorted(STAGES)
    assert project.versions() == [(1, undisturbed["expand"])]


def test_a_model_that_was_registered_when_the_driver_died_is_not_registered_again(
    project: Project, undisturbed: dict[str, str]
) -> None:
    die = {"stage": "enlist", "point": "registered", "count": 1, "who": "driver"}
    project.run(faults={"die": die}, expect=-signal.SIGKILL)
    assert project.versions() == [(1, undisturbed["expand"])]  # the control: the version is there, its receipt is not
    assert "enlist" not in project.published
    project.run()
    assert project.executions[-2:] == ["enlist", "enlist"]
    assert project.versions() == [(1, undisturbed["expand"])] and project.published == undisturbed
