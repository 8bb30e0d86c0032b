"""A stage on a node that shares nothing with the driver: what it says, what it deposits, what another attempt finds."""

import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines import host
from pipelines.cluster import Address
from pipelines.config import AppConfig, ClusterConfig, ClusterMode, StoreConfig
from pipelines.lease import owner_tag
from pipelines.mirror import Mirror
from pipelines.store import Store
from pipelines.worker import Job
from stages.artifacts import Checkpoint, Rows
from stages.contract import StageError
from stages.storage.bucket import Bucket
from stages.storage.hashing import tree_digest
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


NODE = (
    "import pickle, sys; from pipelines import host; host.MIRROR_EVERY_S = 0.1;"
    "list(host._serve(pickle.load(sys.stdin.buffer)))"
)


def test_an_attempt_on_another_node_goes_on_from_the_checkpoint_of_one_that_was_killed(
    remote: AppConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run_on_node(job_of(remote, MakeConfig(value=7)))[-1][1]
    bucket = Store.open(remote).bucket
    rows = Rows(uri=Store.open(remote).object_uri(made.digest), digest=made.digest)
    job = replace(job_of(remote, DoubleConfig(trouble="resume"), rows=rows), fence=1)
    environment = {**os.environ, "RAYKEEL_CACHE": str(tmp_path / "one")}
    node = subprocess.Popen([sys.executable, "-c", NODE], stdin=subprocess.PIPE, env=environment)
    assert node.stdin is not None
    node.stdin.write(pickle.dumps(job))
    node.stdin.close()
    deadline = time.monotonic() + 60
    while bucket.get(f"work/{job.fingerprint}/000001-001/.mirrored") is None:
        assert node.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    node.kill()
    node.wait()
    assert len(list((tmp_path / "one" / "attempts").iterdir())) == 1  # the control: it could not clean up

    monkeypatch.setenv("RAYKEEL_CACHE", str(tmp_path / "two"))
    said = run_on_node(replace(job, fence=2))
    assert ("headline", f"goes on from step 5 of {node.pid}") in said and said[-1][0] == "deposit", said
    monkeypatch.setenv("RAYKEEL_CACHE", str(tmp_path / "one"))
    run_on_node(job_of(remote, MakeConfig(value=8)))
    assert list((tmp_path / "one" / "attempts").iterdir()) == []


def test_what_killed_attempts_left_on_a_node_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYKEEL_CACHE", str(tmp_path))
    ours = f"{owner_tag()}.11111111"
    dead = f"{owner_tag().rpartition('-')[0]}-1.22222222"  # of our pid, but started earlier
    other, long_ago = f"elsewhere-{owner_tag().partition('-')[2]}.33333333", "elsewhere-a-b-1-2-3.44444444"
    for name in (ours, dead, other, long_ago):
        (tmp_path / "attempts" / name / "output").mkdir(parents=True)
    os.utime(tmp_path / "attempts" / long_ago, (time.time() - 2 * host.UNSEEN_S,) * 2)
    cut, arriving, whole = f".{'a' * 64}.12345678", f".{'b' * 64}.12345678", "c" * 64
    for name in (cut, arriving, whole):
        (tmp_path / "objects" / name).mkdir(parents=True)
    with (tmp_path / "objects" / f"{'b' * 64}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        host.sweep()
    assert {path.name for path in (tmp_path / "attempts").iterdir()} == {ours, other}
    assert {path.name for path in (tmp_path / "objects").iterdir() if path.is_dir()} == {arriving, whole}


def test_resumable_state_is_stored_after_a_failure_and_not_after_a_success(tmp_path: Path) -> None:
    bucket = Bucket((tmp_path / "store").as_uri())
    for name, error in (("fails", RuntimeError("the stage failed")), ("succeeds", None)):
        work = tmp_path / name
        with contextlib.suppress(RuntimeError), host._mirrored(Mirror(bucket, work, 1, 1), tmp_path, lambda *_: None):
            (work / "metrics.jsonl").write_text("1\n")
            if error:
                raise error
    assert [e.key for e in bucket.entries("work")] == [
        "work/fails/000001-001/.mirrored",
        "work/fails/000001-001/metrics.jsonl",
    ]


def test_what_stands_in_for_a_directory_is_mirrored_while_the_stage_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "MIRROR_EVERY_S", 0.05)
    bucket = Bucket((tmp_path / "store").as_uri())
    with host._mirrored(Mirror(bucket, tmp_path / "work", 3, 1), tmp_path, lambda *_: None):
        (tmp_path / "work" / "metrics.jsonl").write_text("1\n")
        for _ in range(100):
            if bucket.get("work/work/000003-001/metrics.jsonl") == b"1\n":
                break
            time.sleep(0.05)
        assert bucket.get("work/work/000003-001/metrics.jsonl") == b"1\n"  # a node that dies now has lost nothing


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


def test_an_adapter_brings_its_base_to_the_node(remote: AppConfig) -> None:
    bucket = Bucket(f"{remote.store.root}/objects")

    def put(**files: bytes) -> str:
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        digest = tree_digest(digests)
        for name, data in files.items():
            bucket.put(f"{digest}/{name}", data)
        manifest = {"files": {name: {"sha256": sha256} for name, sha256 in digests.items()}}
        bucket.put(f"{digest}/MANIFEST.json", json.dumps(manifest).encode())
        return digest

    base = put(**{"model.safetensors": b"weights"})
    adapter = put(**{"base.json": json.dumps({"digest": base}).encode()})
    found = Checkpoint(uri=f"{remote.store.root}/objects/{adapter}", digest=adapter).local()
    assert (found.parent / base / "model.safetensors").read_bytes() == b"weights"


TWO_NODES = """
import ray
from ray.cluster_utils import Cluster
from pipelines import host
from stages.contract import StageResources
from stages.training.resources import TrainResources

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 10**8})
cluster.add_node(num_cpus=1, num_gpus=2, object_store_memory=10**8)
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
cluster.wait_for_nodes()
(gpus,) = [node["NodeID"] for node in ray.nodes() if node["Resources"].get("GPU")]
where = ray.remote(num_cpus=0, max_calls=1)(lambda: ray.get_runtime_context().get_node_id())
for resources in (TrainResources(), TrainResources(gpus_per_worker=0), StageResources()):
    strategy = host._place(resources)
    print(strategy is None or ray.get(where.options(scheduling_strategy=strategy).remote()) == gpus, strategy is None)
holder = ray.remote(num_gpus=2)(lambda: __import__("time").sleep(60)).remote()
while ray.available_resources().get("GPU", 0.0):
    pass
print(host._place(TrainResources()))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.ray
@pytest.mark.slow
def test_a_stage_that_trains_goes_to_the_node_with_free_gpus(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", TWO_NODES], env=environment, capture_output=True, text=True, timeout=120
    )
    said = [line for line in done.stdout.splitlines() if line.startswith(("True", "False", "None"))]
    assert said == ["True False", "True True", "True True", "None"], done.stdout + done.stderr
