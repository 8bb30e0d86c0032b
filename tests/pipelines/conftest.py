"""A state root with an MLflow store in it, for tests that run pipelines of stub stages."""

import shutil
from pathlib import Path

import mlflow
import pytest


@pytest.fixture(scope="session")
def fresh_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store whose schema is made once (2 s) and copied for each test."""
    state = tmp_path_factory.mktemp("mlflow-template")
    (state / "mlflow").mkdir()
    mlflow.MlflowClient(f"sqlite:///{state / 'mlflow' / 'mlflow.db'}").search_experiments()
    return state


@pytest.fixture
def state(tmp_path: Path, fresh_mlflow: Path) -> Path:
    shutil.copytree(fresh_mlflow, tmp_path / "state")
    return tmp_path / "state"
