"""A sweep shares the stages that its points have in common."""

from pathlib import Path

import pytest

from tests.e2e.project import Project

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_sweep_makes_shared_stages_once_and_each_point_once(tmp_path: Path) -> None:
    project = Project(tmp_path / "state")
    foreign = {"RAY_ADDRESS": "127.0.0.1:1"}  # a left-over of somebody else's: never joined
    grid = ["stages.clean.validation_fraction=0.1,0.2", "run.until=clean", "run.limit=200"]
    printed = project.cli("sweep", *grid, env=foreign)
    names = [r.data.tags["mlflow.runName"].split()[0] for r in project.runs("quickstart")]
    assert sorted(names) == ["clean", "clean", "ingest", "quickstart", "quickstart"]
    sweeps = {
        r.data.tags.get("raykeel.sweep") for r in project.runs("quickstart") if "mlflow.parentRunId" not in r.data.tags
    }
    assert len(sweeps) == 1 and None not in sweeps
    assert "stages.clean.validation_fraction=0.1" in printed and "point 2 of 2" in printed
    assert not (project.state / "cluster" / "head.json").exists()
