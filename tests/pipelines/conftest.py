"""A state root with an MLflow store in it, for tests that run pipelines of stub stages, and a world to keep house in."""

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest

from pipelines import desk as desks
from pipelines import scribe
from pipelines.config import AppConfig
from pipelines.desk import Desk
from tests.pipelines.scribed import PIPELINE
from tests.pipelines.stored import World
from tests.services import Service


@pytest.fixture(scope="session")
def fresh_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store whose schema is made once (2 s) and copied for each test."""
    state = tmp_path_factory.mktemp("mlflow-template")
    (state / "mlflow").mkdir()
    mlflow.MlflowClient(f"sqlite:///{state / 'mlflow' / 'mlflow.db'}").search_experiments()
    return state


@pytest.fixture
def state(tmp_path: Path, fresh_mlflow: Path) -> Iterator[Path]:
    """With a scribe in this process: one of its own imports MLflow anew (1.5 s), which is not what most tests ask."""
    shutil.copytree(fresh_mlflow, tmp_path / "state")
    with scribe.here(Desk.of(AppConfig(name="stub", state=str(tmp_path / "state")))):
        yield tmp_path / "state"


@pytest.fixture
def bare(tmp_path: Path, fresh_mlflow: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state root with a schema and no scribe yet; whatever scribe came to it is ended."""
    monkeypatch.setenv("RAYKEEL_SCRIBE_IDLE_S", "120")  # a busy machine may need seconds from one command to the next
    shutil.copytree(fresh_mlflow, tmp_path / "state")
    (tmp_path / "conf" / "pipeline").mkdir(parents=True)
    (tmp_path / "conf" / "pipeline" / "stub.yaml").write_text(PIPELINE)
    yield tmp_path / "state"
    desks.end(tmp_path / "state")


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest, fresh_mlflow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A store of each kind and a registry, both empty; `make gc` keeps the last run only."""
    root = None
    if request.param == "s3":
        server: Service = request.getfixturevalue("s3")
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RAYKEEL_CACHE", str(tmp_path / "cache"))
        root = f"s3://store/{uuid.uuid4().hex}"
    return World.make(fresh_mlflow, tmp_path / "state", root, keep_runs=1)
