"""A sweep shares the stages that its points have in common."""

from pathlib import Path

import pytest

from tests.e2e.project import Project

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_sweep_makes_shared_stages_once_and_each_point_once(tmp_path: Path) -> None:
    project = Project(tmp_path / "state")
    foreign = {
        "RAY_ADDRESS": "127.0.0.1:1",
        "SWEEP": "fractions",
    }  # the first a left-over of somebody else's: never joined
    grid = [
        "stages.clean.validation_fraction=0.1,0.2",
        "run.until=clean",
        "run.limit=200",
        "sweep.metric=clean.rows_out",
    ]
    printed = project.cli("sweep", *grid, env=foreign)
    runs = {run.info.run_id: run for run in project.runs("quickstart")}
    assert sorted(run.info.run_name for run in runs.values()) == [
        "clean",
        "clean",
        "fractions",
        "ingest",
        "point 1",
        "point 2",
    ]
    [above] = [run for run in runs.values() if run.data.tags.get("raykeel.kind") == "sweep"]
    points = [run for run in runs.values() if run.data.tags.get("mlflow.parentRunId") == above.info.run_id]
    varied = {run.data.params["stages.clean.validation_fraction"]: run.data.metrics["clean.rows_out"] for run in points}
    assert varied.keys() == {"0.1", "0.2"}
    assert "stages.clean.validation_fraction=0.1" in printed and "point 2 of 2" in printed
    assert not (project.state / "cluster" / "head.json").exists()
