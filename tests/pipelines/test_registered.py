"""The whole registry, read without MLflow: the same from a SQLite file and from a server."""

import uuid
from pathlib import Path

import mlflow
import pytest

from pipelines import registered
from pipelines.config import AppConfig, TrackingConfig, TrackingMode
from pipelines.registered import Version
from tests.services import Service


def fill(client: mlflow.MlflowClient, name: str) -> None:
    client.create_registered_model(name)
    for number in range(1, 5):
        tags = {"digest": f"{number:064x}"} if number != 3 else {}
        client.create_model_version(name, source="s3://store/objects/x", tags=tags)
    client.set_registered_model_alias(name, "champion", "2")
    client.set_registered_model_alias(name, "candidate", "4")
    client.delete_model_version(name, "1")


def require(app: AppConfig, name: str) -> None:
    found = registered.read(app)
    mine = {key: version for key, version in found.versions.items() if key[0] == name}
    assert mine == {
        (name, 2): Version(name, 2, f"{2:064x}"),
        (name, 3): Version(name, 3, None),
        (name, 4): Version(name, 4, f"{4:064x}"),
    }
    assert {key: number for key, number in found.aliases.items() if key[0] == name} == {
        (name, "champion"): 2,
        (name, "candidate"): 4,
    }
    assert found.of(name, 2) == ["champion"] and found.of(name, 3) == []


def test_a_file(state: Path) -> None:
    fill(mlflow.MlflowClient(f"sqlite:///{state / 'mlflow' / 'mlflow.db'}"), "lm")
    require(AppConfig(name="x", state=str(state)), "lm")


def test_no_file_is_an_empty_registry(tmp_path: Path) -> None:
    found = registered.read(AppConfig(name="x", state=str(tmp_path)))
    assert found.versions == {} and found.aliases == {}


@pytest.mark.slow
def test_a_server_whose_answers_come_in_pages(
    mlflow_server: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"lm-{uuid.uuid4().hex[:6]}"
    client = mlflow.MlflowClient(mlflow_server.uri)
    fill(client, name)
    client.create_registered_model(f"{name}-other")
    monkeypatch.setattr(registered, "PAGE", "1")
    tracking = TrackingConfig(mode=TrackingMode.server, uri=mlflow_server.uri)
    require(AppConfig(name="x", state=str(tmp_path), tracking=tracking), name)
