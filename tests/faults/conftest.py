"""Projects to strike, and what an undisturbed one gives."""

import shutil
import uuid
from pathlib import Path

import mlflow
import pytest

from tests.faults import crowd, stages
from tests.faults.project import Project
from tests.services import Service


@pytest.fixture(scope="session")
def with_schema(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state root whose MLflow store has its schema (2 s): made once, copied for each test."""
    state = tmp_path_factory.mktemp("faults") / "state"
    (state / "mlflow").mkdir(parents=True)
    mlflow.MlflowClient(f"sqlite:///{state / 'mlflow' / 'mlflow.db'}").search_experiments()
    return state


def project_in(place: Path, with_schema: Path) -> Project:
    (place / "conf" / "pipeline").mkdir(parents=True)
    for name, text in {"faults": stages.PIPELINE, "crowd": crowd.PIPELINE}.items():
        (place / "conf" / "pipeline" / f"{name}.yaml").write_text(text)
    shutil.copytree(with_schema, place / "state")
    return Project(place / "state", place / "conf")


@pytest.fixture
def project(tmp_path: Path, with_schema: Path) -> Project:
    return project_in(tmp_path, with_schema)


@pytest.fixture(params=["directory", "s3"])
def stored(
    request: pytest.FixtureRequest, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Project:
    """A project on a store of each kind."""
    if request.param == "s3":
        server: Service = request.getfixturevalue("s3")
        project.env = {**server.env, "RAYKEEL_CACHE": str(tmp_path / "cache")}
        project.root = f"s3://store/{uuid.uuid4().hex}"
        for name, value in project.env.items():
            monkeypatch.setenv(name, value)
    return project


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, with_schema: Path) -> dict[str, str]:
    """Stage -> content digest, from a run to which nothing happened."""
    project = project_in(tmp_path_factory.mktemp("undisturbed"), with_schema)
    project.run()
    assert project.executions == list(stages.STAGES)
    project.require_tidy()
    return project.published
