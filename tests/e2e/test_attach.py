"""`cluster=attach` to a Ray that somebody else started, whose processes can see nothing of the driver: the store alone joins them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from pipelines.config import ROOT
from tests.e2e.project import SMALL, Project
from tests.services import Service, free_port

HIDING = os.geteuid() == 0  # mounts over what the cluster must not see

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(420),
    pytest.mark.skipif(
        not HIDING, reason="hiding the driver's directories from the cluster needs root (mount namespaces)"
    ),
]


@dataclass
class Cluster:
    """A hand-started Ray."""

    address: str
    env: dict[str, str]
    cache: Path


@pytest.fixture
def cluster(tmp_path: Path, s3: Service) -> Iterator[Cluster]:
    """A head started in another directory, in a mount namespace where the driver's state, cache and code are empty and stay so."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    hidden = [tmp_path / "driver", ROOT / "stages", ROOT / "pipelines", ROOT / "conf"]
    hidden[0].mkdir()
    port, agent = free_port(), free_port()
    token = elsewhere / "token"
    token.write_text(uuid.uuid4().hex * 2)
    token.chmod(0o600)
    temp = Path(f"/tmp/rk-{uuid.uuid4().hex[:8]}")  # short, for Ray's sockets
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    env = {**s3.env, **auth, "RAY_USAGE_STATS_ENABLED": "0", "RAYKEEL_CACHE": str(elsewhere / "cache")}
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    start += ["--num-cpus=4", "--include-dashboard=false", f"--temp-dir={temp}", "--object-store-memory=300000000"]
    start += [
        "--node-ip-address=127.0.0.1",
        f"--dashboard-agent-listen-port={agent}",
        f"--ray-client-server-port={free_port()}",
    ]
    # Read-only: a process of the cluster that makes a driver's path for itself is found out, too.
    mounts = " && ".join(f"mount -t tmpfs -o ro,mode=0755 none '{path}'" for path in hidden)
    script = f'{mounts} && exec "$@"'
    log = (elsewhere / "ray.log").open("wb")
    process = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "bash", "-c", script, "ray", *start],
        cwd=elsewhere,
        stdout=log,
        stderr=log,
        start_new_session=True,
        env={**{k: v for k, v in os.environ.items() if not k.startswith(("RAY", "PYTHONPATH"))}, **env},
    )
    try:
        deadline = time.monotonic() + 60
        while b"Ray runtime started" not in (elsewhere / "ray.log").read_bytes():
            assert process.poll() is None and time.monotonic() < deadline, (elsewhere / "ray.log").read_text()
            time.sleep(0.2)
        yield Cluster(f"127.0.0.1:{port}", auth, elsewhere / "cache")
    finally:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
        log.close()
        shutil.rmtree(temp, ignore_errors=True)


def test_the_quickstart_passes_on_a_cluster_that_sees_no_directory_of_the_driver(
    cluster: Cluster, tmp_path: Path, s3: Service
) -> None:
    project = Project(tmp_path / "driver" / "state")
    root = f"s3://store/{uuid.uuid4().hex}"
    env = {**s3.env, **cluster.env, "RAYKEEL_CACHE": str(tmp_path / "driver" / "cache")}
    where = [*SMALL, "cluster=attach", f"cluster.address={cluster.address}", f"store.root={root}"]
    said = project.cli("run", *where, env=env)
    assert "9 of 9 stages ran" in said, said
    # The control: the driver's own directories are in use, and the cluster read and wrote copies of its own.
    assert (project.state / "mlflow" / "mlflow.db").exists() and list((cluster.cache / "objects").iterdir())
    assert not (project.state / "store").exists()

    client = openai.OpenAI(base_url=project.v1, api_key="none")
    assert client.models.list().data[0].id == "quickstart"
    again = project.cli("run", *where, env=env)
    assert "0 of 9 stages to run" in again, again

    # A stage that fails on the cluster fails like everywhere: its message, its exit code, nothing published.
    broken = project.cli(
        "run",
        *where,
        "stages.clean.min_characters=100000000",
        "stages.clean.max_characters=100000000",
        check=2,
        env=env,
    )
    assert "rows were filtered out" in broken and "Traceback" not in broken

    base = project.v1
    assert "stopped serving quickstart@1" in project.cli("down", *where, env=env)
    with pytest.raises((openai.APIConnectionError, openai.NotFoundError)):
        openai.OpenAI(base_url=base, api_key="none", max_retries=0).models.list()
