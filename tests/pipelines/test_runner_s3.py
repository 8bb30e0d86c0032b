"""A whole pipeline whose store is an object store, from a driver that runs its stages itself."""

import shutil
import uuid
from pathlib import Path

import pytest

from pipelines.config import AppConfig
from pipelines.store import IntegrityError, Store
from tests.pipelines.stubs import executions
from tests.pipelines.test_runner import app_of, client, go
from tests.services import Service

pytestmark = pytest.mark.slow  # every artifact that MLflow writes to S3 makes a client of its own: seconds a run


@pytest.fixture
def state(tmp_path: Path, s3: Service, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {**s3.env, "RAYKEEL_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "state"


def on_s3(state: Path, prefix: str, **values: object) -> AppConfig:
    app = app_of(state, **values)
    app.store.root = f"s3://store/{prefix}"
    return app


def test_everything_that_is_published_is_in_the_object_store_and_is_reused_from_there(state: Path) -> None:
    prefix = uuid.uuid4().hex
    outcome = go(on_s3(state, prefix))
    assert executions(state) == ["make", "double", "judge"]
    store = Store.open(on_s3(state, prefix))
    assert len(store.bucket.children("objects")) == 3
    assert not (state / "store").exists() and list((state / "scratch" / "staging").iterdir()) == []
    # MLflow's artifacts are there too.
    run = client(state).get_run(outcome.run_id or "")
    assert run.info.artifact_uri.startswith(f"s3://store/{prefix}/mlflow/")
    assert any(key.endswith("report.html") for key in (e.key for e in store.bucket.entries("mlflow")))
    # The driver reads facts, never data: what no stage took in was copied by nobody.
    last = next(record for record in store.records() if record.payload["stage"] == "judge")
    copied = {path.name for path in (state.parent / "cache" / "objects").iterdir() if path.is_dir()}
    assert copied == set(store.bucket.children("objects")) - {last.digest}
    assert go(on_s3(state, prefix)).executed == 0
    # Another machine, which has nothing but the credentials.
    elsewhere = state.parent / "elsewhere"
    assert go(on_s3(elsewhere, prefix)).executed == 0
    assert executions(elsewhere) == []


def test_bytes_that_changed_in_the_object_store_are_found_by_who_reads_them_and_made_again(state: Path) -> None:
    prefix = uuid.uuid4().hex
    go(on_s3(state, prefix))
    other = state.parent / "other"  # a machine that never hashed these blobs
    store = Store.open(on_s3(other, prefix))
    made = next(r for r in store.records() if r.payload["stage"] == "make")
    size = store.manifest(made.digest)["summary.json"][0]
    store.bucket.put(f"objects/{made.digest}/summary.json", b"{" + b" " * (size - 2) + b"}")  # as long as it was
    shutil.rmtree(state.parent / "cache")  # this node has no copy yet
    with pytest.raises(
        IntegrityError, match=r"double read the result of make: .*summary\.json: its bytes changed.*run again"
    ):
        go(on_s3(other, prefix, double={"factor": 5}))
    assert go(on_s3(other, prefix, double={"factor": 5})).executed == 3
    assert executions(other) == ["double", "make", "double", "judge"]
