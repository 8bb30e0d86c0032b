"""SIGKILL of the driver at every boundary of every stage: the same command again finishes the work, and nothing is done or told twice."""

import signal
import time

import pytest

from pipelines import desk
from tests.faults.project import Project
from tests.faults.stages import STAGES

pytestmark = [pytest.mark.faults, pytest.mark.slow]

POINTS = ("before-start", "before-commit", "after-commit", "after-close")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("point", POINTS)
def test_the_same_command_again_finishes_what_a_killed_driver_left(
    project: Project, undisturbed: dict[str, str], stage: str, point: str
) -> None:
    project.run(env={"RAYKEEL_KILL_AT": f"{stage}:{point}"}, expect=-signal.SIGKILL)
    # The scribe lives, sees that nobody will say how the run ended, and says so.
    deadline = time.monotonic() + 15
    while "RUNNING" in [status for _, status, _ in project.runs()]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert project.statuses("faults") == ["KILLED"]
    require_finished_by_the_same_command(project, undisturbed, stage, point)


@pytest.mark.parametrize("point", POINTS)
def test_what_a_lost_machine_left_running_is_closed_by_the_next_invocation(
    project: Project, undisturbed: dict[str, str], point: str
) -> None:
    """Driver and scribe die together; with the last stage published, the next invocation has nothing else to do."""
    project.run(
        env={"RAYKEEL_KILL_AT": f"enlist:{point}"}, faults={"scribe": str(project.state)}, expect=-signal.SIGKILL
    )
    assert project.statuses("faults") == ["RUNNING"] and not desk.running(project.state)  # the control
    require_finished_by_the_same_command(project, undisturbed, "enlist", point)


def require_finished_by_the_same_command(project: Project, undisturbed: dict[str, str], stage: str, point: str) -> None:
    before = STAGES[: STAGES.index(stage)]
    # The control: it died exactly there.
    assert project.executions == [*before, *([stage] if point != "before-start" else [])]
    assert set(project.published) == {*before, *([stage] if point.startswith("after") else [])}
    project.require_sound()

    project.run()
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
