"""A stage on a node that shares nothing with the driver: what it says, what it deposits, what another attempt finds."""

import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from pipelines import host
from pipelines.cluster import Address
from pipelines.config import AppConfig, ClusterConfig, ClusterMode, StoreConfig
from pipelines.store import Store
from pipelines.worker import Job
from stages.artifacts import Rows
from stages.contract import StageError
from stages.storage.bucket import Bucket
from tests.pipelines.stubs import DoubleConfig, MakeConfig
from tests.services import Service

WHERE = Address("127.0.0.1:1", {}, 1.0)


@pytest.fixture
def remote(tmp_path: Path, s3: Service, monkeypatch: pytest.MonkeyPatch) -> AppConfig:
    """An app whose store is an empty prefix on S3 and whose node's cache is its own."""
    for name, value in {**s3.env, "RAYKEEL_CACHE": str(tmp_path / "node")}.items():
        monkeypatch.setenv(name, value)
    return AppConfig(
        name="stub",
        state=str(tmp_path / "driver"),
        cluster=ClusterConfig(mode=ClusterMode.attach, address=WHERE.address),
        store=StoreConfig(root=f"s3://store/{uuid.uuid4().hex}"),
    )


def job_of(app: AppConfig, cfg: Any, **inputs: Any) -> Job:
    scratch = app.scratch_root
    return Job(
        name="stub",
        cfg=cfg,
        inputs=inputs,
        app=app,
        fingerprint="f" * 64,
        staged=scratch / "staging" / uuid.uuid4().hex,
        work=scratch / "work" / ("f" * 64),
        ray=WHERE,
    )


def run_on_node(job: Job) -> list[tuple[Any, ...]]:
    """What the node says, to its last message."""
    return list(host._serve(job))


def test_a_node_runs_the_stage_deposits_and_leaves_nothing_behind(remote: AppConfig, tmp_path: Path) -> None:
    said = run_on_node(job_of(remote, MakeConfig(value=7)))
    kinds = [message[0] for message in said]
    assert kinds[-2:] == ["made", "deposit"] and ("headline", "made 7") in said
    assert not (tmp_path / "driver").exists()
    assert list((tmp_path / "node" / "attempts").iterdir()) == []
    Store.open(remote).verify(said[-1][1].digest, deep=True)


def test_a_stage_that_fails_there_fails_here_with_its_message(remote: AppConfig) -> None:
    made = run_on_node(job_of(remote, MakeConfig(value=7)))[-1][1]
    rows = Rows(uri=Store.open(remote).object_uri(made.digest), digest=made.digest)
    last = run_on_node(job_of(remote, DoubleConfig(trouble="user"), rows=rows))[-1]
    assert last[0] == "failed" and isinstance(last[1], StageError) and str(last[1]) == "rows.jsonl:3: broken"


def test_resumable_state_follows_to_the_store_and_back(tmp_path: Path) -> None:
    bucket = Bucket((tmp_path / "store").as_uri())
    with host._mirrored(bucket, tmp_path / "one" / "work"):
        checkpoint = tmp_path / "one" / "work" / "checkpoints" / "step-00000005"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.pt").write_bytes(b"weights")
        (checkpoint / "complete.json").write_text("{}")
        (checkpoint.parent / ".writing-00000009").mkdir()
        (checkpoint.parent / ".writing-00000009" / "state.pt").write_bytes(b"half")
    assert [e.key for e in bucket.entries("work")] == [
        "work/work/checkpoints/step-00000005/complete.json",
        "work/work/checkpoints/step-00000005/state.pt",
    ]
    with host._mirrored(bucket, tmp_path / "two" / "work"):  # another node
        found = tmp_path / "two" / "work" / "checkpoints" / "step-00000005"
        assert (found / "state.pt").read_bytes() == b"weights"
        (found / "state.pt").unlink()
        (found / "complete.json").write_text('{"step": 5}')
    assert [e.key for e in bucket.entries("work")] == ["work/work/checkpoints/step-00000005/complete.json"]
    assert bucket.get("work/work/checkpoints/step-00000005/complete.json") == b'{"step": 5}'


def test_what_stands_in_for_a_directory_is_mirrored_while_the_stage_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "MIRROR_EVERY_S", 0.05)
    bucket = Bucket((tmp_path / "store").as_uri())
    with host._mirrored(bucket, tmp_path / "work"):
        (tmp_path / "work" / "metrics.jsonl").write_text("1\n")
        for _ in range(100):
            if bucket.get("work/work/metrics.jsonl") == b"1\n":
                break
            time.sleep(0.05)
        assert bucket.get("work/work/metrics.jsonl") == b"1\n"  # a node that dies now has lost nothing


@pytest.mark.slow
@pytest.mark.ray
def test_messages_stream_from_a_task_and_its_errors_keep_their_type(
    remote: AppConfig, s3: Service, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    task = ray.remote
    environment = {"env_vars": {**s3.env, "RAYKEEL_CACHE": str(remote.state_root.parent / "node")}}
    monkeypatch.setattr(ray, "remote", lambda **options: task(**options, runtime_env=environment))
    said: list[tuple[Any, ...]] = []
    deposit = host.execute_on_cluster(job_of(remote, MakeConfig(value=3)), lambda *message: said.append(message))
    Store.open(remote).verify(deposit.digest, deep=True)
    assert ("headline", "made 3") in said and said[-1] == ("made",)
    with pytest.raises(StageError, match=r"rows\.jsonl:3: broken"):
        rows = Rows(uri=Store.open(remote).object_uri(deposit.digest), digest=deposit.digest)
        host.execute_on_cluster(job_of(remote, DoubleConfig(trouble="user"), rows=rows), lambda *message: None)
