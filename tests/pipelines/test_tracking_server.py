"""`tracking=server` on a real MLflow server with PostgreSQL and S3: runs, doubles, the registry by REST, artifacts on S3."""

import json
import math
from pathlib import Path

import mlflow
import pytest

from pipelines.registering import MlflowRegistry
from pipelines.registry import RegistryReader
from pipelines.tracking import Sender, Tracking
from stages.artifacts import Checkpoint, Rows
from stages.contract import ResourcesUnavailable, StageError
from tests.services import Service

pytestmark = pytest.mark.slow


@pytest.fixture(params=["postgresql", "sqlite"])
def tracking(request: pytest.FixtureRequest, tmp_path: Path) -> Tracking:
    """The same on a server with PostgreSQL and on a local file."""
    if request.param == "sqlite":
        return Tracking(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path, "e", 10.0)
    server: Service = request.getfixturevalue("mlflow_server")
    return Tracking(server.uri, tmp_path, f"e-{tmp_path.name}", 10.0)


LINES = [
    {"op": "metrics", "points": [["loss", 3.0, 1000, 0], ["loss", 2.0, 2000, 1], ["other", math.nan, 2000, 1]]},
    {"op": "metrics", "points": [["loss", 2.0, 2000, 2]]},  # the same value and time at another step
    {"op": "params", "params": {"a": "1"}},
    {"op": "tags", "tags": {"b": "2"}},
    {
        "op": "dataset",
        "name": "rows",
        "digest": "d" * 36,
        "uri": "s3://x/y",
        "context": "train",
        "profile": {"rows": 1.0},
    },
    {"op": "text", "text": "hello", "path": "c.txt"},
    {"op": "end", "status": "FINISHED", "at": 3000},
]


def test_every_line_can_be_sent_twice_and_in_other_groups(tracking: Tracking, tmp_path: Path) -> None:
    run = tracking.start_parent("p", {"t": "1"})
    sender = Sender(tracking, run.path)
    sender.run_id = run.run_id
    all_points = {"op": "metrics", "points": [p for line in LINES[:2] for p in line["points"]]}  # type: ignore[union-attr]
    for line in [*LINES, *LINES, all_points, LINES[-1]]:
        sender.send(line)
    run.close("FINISHED")
    assert run.run_id
    history = tracking.client.get_metric_history(run.run_id, "loss")
    assert sorted((m.step, m.timestamp, m.value) for m in history) == [(0, 1000, 3.0), (1, 2000, 2.0), (2, 2000, 2.0)]
    assert len(tracking.client.get_metric_history(run.run_id, "other")) == 1
    found = tracking.client.get_run(run.run_id)
    assert found.data.params == {"a": "1"} and found.data.tags["b"] == "2" and found.info.status == "FINISHED"
    assert [(d.dataset.name, d.tags[0].value) for d in found.inputs.dataset_inputs] == [("rows", "train")]
    place = tracking.client.download_artifacts(run.run_id, "c.txt", str(tmp_path))
    assert Path(place).read_text() == "hello"


def test_what_is_registered_is_read_back_without_mlflow(tracking: Tracking, tmp_path: Path) -> None:
    name = f"m-{tmp_path.name}"
    run = tracking.start_parent("p", {})
    registry, reader = MlflowRegistry(tracking, run), RegistryReader(tracking.uri)
    local = Checkpoint(uri=(tmp_path / "weights").as_uri(), digest="a" * 64)
    remote = Checkpoint(uri=f"s3://store/objects/{'b' * 64}", digest="b" * 64)
    for asked in (registry, reader):  # before anything is there
        assert asked.find(name, local.digest) is None and asked.alias(name, "candidate") is None
    assert registry.register(name, local, {"data": "it's 'quoted'"}, {"loss": 1.25}) == 1
    assert registry.register(name, remote, {}, {}) == 2
    registry.set_alias(name, "candidate", 2)
    for asked in (registry, reader):
        assert (asked.find(name, local.digest), asked.find(name, remote.digest), asked.find(name, "c" * 64)) == (
            1,
            2,
            None,
        )
        assert asked.alias(name, "candidate") == 2 and asked.alias(name, "champion") is None
        assert asked.resolve(f"models:/{name}/1") == (local.uri, local.digest)
        assert asked.resolve(f"models:/{name}@candidate") == (remote.uri, remote.digest)
        with pytest.raises(StageError, match="has the alias 'champion'"):
            asked.resolve(f"models:/{name}@champion")
        with pytest.raises(StageError, match="no version 3"):
            asked.resolve(f"models:/{name}/3")
    version = tracking.client.get_model_version(name, "1")
    assert version.tags["loss"] == "1.25" and version.run_id == run.run_id
    server = tracking.uri.startswith("http")
    assert version.source == (f"runs:/{run.run_id}/model" if server else local.uri)
    assert tracking.client.get_model_version(name, "2").source == remote.uri
    run.close("FINISHED")


def test_a_version_that_no_pipeline_made_is_refused(tracking: Tracking, tmp_path: Path) -> None:
    name = f"m-{tmp_path.name}"
    tracking.client.create_registered_model(name)
    tracking.client.create_model_version(name, "s3://elsewhere/model")
    with pytest.raises(StageError, match="carries no content digest"):
        RegistryReader(tracking.uri).resolve(f"models:/{name}/1")
    with pytest.raises(ResourcesUnavailable, match="the alias was not moved"):
        MlflowRegistry(tracking, tracking.start_parent("p", {})).set_alias(name, "candidate", 7)


def test_a_new_experiment_of_a_local_store_keeps_its_files_where_the_artifacts_are(
    tmp_path: Path, s3: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    tracking = Tracking(f"sqlite:///{tmp_path / 'm.db'}", tmp_path, "an experiment", 10.0, "s3://store/prefix/mlflow")
    found = tracking.client.get_experiment_by_name("an experiment")
    assert found is not None and found.artifact_location == "s3://store/prefix/mlflow/an%20experiment"
    run = tracking.start_parent("p", {})
    run.log_text("hello", "a/b.txt")
    run.close("FINISHED")
    assert run.failed is None
    place = tracking.client.download_artifacts(run.run_id or "", "a/b.txt", str(tmp_path))
    assert Path(place).read_text() == "hello"


def test_a_pipeline_runs_on_a_tracking_server(tmp_path: Path, mlflow_server: Service) -> None:
    from pipelines import runner, session
    from pipelines.config import AppConfig, TrackingConfig, TrackingMode
    from pipelines.console import Console
    from tests.pipelines.registry_stubs import EnlistConfig
    from tests.pipelines.stubs import MakeConfig

    name = f"m{tmp_path.name.replace('_', '-')}"
    app = AppConfig(
        name=name,
        state=str(tmp_path / "state"),
        tracking=TrackingConfig(mode=TrackingMode.server, uri=mlflow_server.uri),
        stages={"make": MakeConfig(), "enlist": EnlistConfig(inputs={"rows": "make"}, name=name)},
    )
    with session.Session(app, Console()) as opened:
        outcome = runner.run(app, opened, "make run")
    assert outcome.executed == 2
    uri, digest = RegistryReader(mlflow_server.uri).resolve(f"models:/{name}@candidate")
    assert Rows(uri=uri, digest=digest).summary()["value"] == 1
    client = mlflow.MlflowClient(mlflow_server.uri)
    found = client.get_experiment_by_name(name)
    assert found is not None and found.artifact_location.startswith("mlflow-artifacts:")
    runs = client.search_runs([found.experiment_id])
    assert sorted((r.info.status, "mlflow.parentRunId" in r.data.tags) for r in runs) == [
        ("FINISHED", False),
        ("FINISHED", True),
        ("FINISHED", True),
    ]
    assert json.loads(Path(client.download_artifacts(outcome.run_id or "", "config.json", str(tmp_path))).read_text())
