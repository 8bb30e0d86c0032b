"""A Ray that cannot give what is asked, that is full, that is not ours, or that is not there at all."""

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

import pytest

from tests.e2e.test_trouble import left_on_the_cluster
from tests.faults.project import Project
from tests.services import free_port

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.ray]

QUIET = {"quiet": True}
FOUR = "cluster.num_cpus=4"


@pytest.fixture
def crowd(project: Project) -> Iterator[Project]:
    project.pipeline = "crowd"
    yield project
    project.run(verb="down", expect=None)


def held(project: Project, workers: int, until: Path) -> "subprocess.Popen[str]":
    """A pipeline that holds so many of the head's four CPUs."""
    words = [
        f"stages.crowd.resources.workers={workers}",
        f"stages.crowd.resources.until={until}",
        "stages.crowd.value=2",
    ]
    # An address that somebody left in the environment, where nothing listens: never joined.
    process = project.start(FOUR, *words, faults=QUIET, env={"RAY_ADDRESS": f"127.0.0.1:{free_port()}"})
    deadline = time.monotonic() + 90
    while not (found := [event for event, _, _ in project.events() if event.startswith("crowd on ")]):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.1)
    assert found[0].startswith("crowd on 127.0.0.1:") and not found[0].endswith(":1")
    return process


def test_what_the_cluster_has_not_is_refused_and_what_is_busy_is_waited_for_until_a_limit(
    crowd: Project, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    holder = held(crowd, 3, go)
    try:
        said = crowd.run(FOUR, "stages.crowd.resources.workers=8", faults=QUIET, expect=5)
        begun = crowd.events("crowd begin")[-1][2]
        assert time.monotonic() - begun < 10
        assert "needs 8 CPU, cluster has 4: set stages.crowd.resources.workers <= 4" in said

        said = crowd.run(FOUR, "stages.crowd.resources.workers=2", faults=QUIET, expect=5)
        waited = time.monotonic() - crowd.events("crowd begin")[-1][2]
        assert 5 <= waited < 15
        assert "needs 2 CPU, cluster has 4 of which 1 are free: stop what holds the others" in said

        # The control: those CPUs are held by a placement group, and by that alone.
        seen = left_on_the_cluster(crowd)  # type: ignore[arg-type]
        assert seen == {"groups": ["CREATED"], "cpus": 1.0}
        # With room again, the same command succeeds; and what a signal ended holds nothing any more.
        counting = subprocess.Popen(
            [sys.executable, "-c", COUNT, str(crowd.state)],
            env=crowd.environment(None),
            stdout=subprocess.PIPE,
            text=True,
        )
        holder.send_signal(signal.SIGTERM)
        assert holder.wait(timeout=20) == 143
        crowd.run(FOUR, "stages.crowd.resources.workers=2", faults=QUIET)
        counted, _ = counting.communicate(timeout=90)
        assert counted.splitlines()[-1] == "[] 4.0"
    finally:
        go.touch()
        holder.kill()


COUNT = """
import sys, time; from pathlib import Path; from pipelines import cluster; from pipelines.config import ClusterConfig
with cluster.connect(ClusterConfig(), Path(sys.argv[1])):
    import ray; from ray.util import placement_group_table
    end = time.monotonic() + 60
    while time.monotonic() < end:
        groups = [g["state"] for g in placement_group_table().values() if g["state"] != "REMOVED"]
        free = ray.available_resources().get("CPU", 0.0)
        if not groups and free == 4.0: break
        time.sleep(0.2)
    print(groups, free)
"""


def test_a_cluster_that_others_fill_is_waited_for_until_a_limit(crowd: Project, tmp_path: Path) -> None:
    holder = held(crowd, 4, tmp_path / "go")
    try:
        said = crowd.run(FOUR, "cluster.connect_timeout_s=3", faults=QUIET, expect=5)
        assert "a stage needs 1 CPU at least; the cluster has 4 and none of them came free in 3 s" in said
    finally:
        (tmp_path / "go").touch()
        assert holder.wait(timeout=60) == 0


@dataclass
class Foreign:
    """A Ray that somebody started by hand, with a token."""

    address: str
    token: Path


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Foreign]:
    token = tmp_path / "token"
    token.write_text(uuid.uuid4().hex * 2)
    token.chmod(0o600)
    port, temp = free_port(), Path(f"/tmp/rk-{uuid.uuid4().hex[:8]}")  # short, for Ray's sockets
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    start += ["--num-cpus=2", "--include-dashboard=false", f"--temp-dir={temp}", "--object-store-memory=200000000"]
    start += ["--node-ip-address=127.0.0.1", f"--dashboard-agent-listen-port={free_port()}"]
    start += [f"--ray-client-server-port={free_port()}"]
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    log = tmp_path / "ray.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            start,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **auth, "RAY_USAGE_STATS_ENABLED": "0"},
        )
    try:
        deadline = time.monotonic() + 90
        while b"Ray runtime started" not in log.read_bytes():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield Foreign(f"127.0.0.1:{port}", token)
    finally:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
        shutil.rmtree(temp, ignore_errors=True)


def test_a_wrong_or_missing_token_is_one_line_that_names_the_cluster(
    project: Project, foreign: Foreign, tmp_path: Path
) -> None:
    project.pipeline = "crowd"
    attach = ["cluster=attach", f"cluster.address={foreign.address}"]
    wrong = tmp_path / "wrong"
    wrong.write_text("f" * 64)
    wrong.chmod(0o600)
    base = {"RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    for token in (wrong, tmp_path / "missing"):
        begun = time.monotonic()
        said = project.run(*attach, faults=QUIET, env={**base, "RAY_AUTH_TOKEN_PATH": str(token)}, expect=5)
        assert time.monotonic() - begun < 45  # 30 s, and Python's start on a busy machine
        (line,) = [text for text in said.splitlines() if "error:" in text]
        assert foreign.address in line and "token" in line.lower(), said
        assert "Traceback" not in said and project.published == {}
    # The control: with its token the same command is let in.
    project.run(*attach, faults=QUIET, env={**base, "RAY_AUTH_TOKEN_PATH": str(foreign.token)})
    assert any(event == f"crowd on {foreign.address}" for event, _, _ in project.events())
