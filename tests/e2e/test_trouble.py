"""What people and machines do wrong, through the command line: one message, the right exit code, nothing half published."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines.config import ROOT
from pipelines.lease import Slots
from pipelines.store import Store
from stages.storage.bucket import Bucket
from tests.e2e.project import SMALL, Project

DATA = ["run.until=ingest", "run.limit=50"]


def records(project: Project) -> set[str]:
    """Names of the stages that have a published result."""
    return set(digests(project.state / "store"))


def digests(root: Path) -> dict[str, str]:
    """Stage -> digest of its published result."""
    if not root.exists():
        return {}
    return {r.payload["stage"]: r.digest for r in Store(root.as_uri(), root).records()}


def held(project: Project) -> list[str]:
    """Results that somebody is making, as their leases say."""
    bucket = Bucket((project.state / "store").as_uri())
    return [f for f in bucket.children("results") if Slots.of(bucket, f).holder() is not None]


def test_an_unknown_key_exits_with_1_and_starts_nothing(project: Project) -> None:
    printed = project.cli("run", "stages.train.learning_rat=1", check=1)
    assert printed.splitlines()[-1] == "raykeel exited with code 1"
    assert "did you mean 'learning_rate'" in printed and "Traceback" not in printed
    assert not (project.state / "store").exists()


def test_a_missing_source_exits_with_1(project: Project) -> None:
    printed = project.cli("run", "ingest=files", "stages.ingest.source.path=nowhere.jsonl", check=1)
    assert "error: stages.ingest.source.path: no file or directory nowhere.jsonl" in printed
    assert not (project.state / "store").exists()


@pytest.mark.slow
def test_broken_lines_above_one_percent_exit_with_2_and_name_them(project: Project, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "fine"}\n{"text": "CANARY broken\n' + '{"text": "fine too"}\n' * 8)
    printed = project.cli("run", "ingest=files", f"stages.ingest.source.path={rows}", "run.until=ingest", check=2)
    assert "2" in printed and "CANARY" not in printed and "raykeel exited with code 2" in printed
    assert records(project) == set()


def test_an_absent_mlflow_server_exits_with_5_within_15_seconds(project: Project) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    begun = time.monotonic()
    uri = f"tracking.uri=http://bob:CANARY@127.0.0.1:{port}"
    printed = project.cli("run", *DATA, "tracking=server", uri, check=5)
    assert time.monotonic() - begun < 15
    assert "no MLflow server answers" in printed and records(project) == set()
    printed += project.cli("config", "tracking=server", uri)
    written = [path for path in project.state.rglob("*") if path.is_file() and b"CANARY" in path.read_bytes()]
    assert "CANARY" not in printed and written == []


def test_a_state_directory_that_cannot_be_written_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    project = Project(tmp_path / "file" / "state")
    printed = project.cli("run", *DATA, check=1)
    assert "cannot be written" in printed and str(project.state) in printed


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_disk_without_room_is_named_before_anything_starts(project: Project, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)], check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        printed = project.cli("run", *DATA, f"store.root={small}/store", check=5)
        assert "MB free" in printed and str(small) in printed
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.slow
def test_a_dead_attach_address_exits_with_5_and_says_where_it_came_from(project: Project) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    begun = time.monotonic()
    printed = project.cli(
        "run", "run.limit=50", "run.until=clean", "cluster=attach", f"cluster.address=127.0.0.1:{port}", check=5
    )
    assert time.monotonic() - begun < 30
    assert "nothing answers there" in printed and "from the config" in printed


@pytest.mark.ray
@pytest.mark.slow
def test_more_workers_than_the_cluster_has_exits_with_5_and_leaves_no_training(tokenized: Project) -> None:
    """Few enough for the memory of this machine, which is asked first; more than a local head has processors."""
    project = tokenized
    printed = project.cli("run", *SMALL, "run.until=train", "stages.train.resources.workers=9", check=5)
    assert "needs 9 CPU" in printed and "stages.train.resources.workers" in printed
    assert "train" not in records(project)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.faults
def test_ctrl_c_in_training_ends_in_15_seconds_and_what_served_still_serves(trained: Project) -> None:
    project = trained
    # One scribe for all runs, however slow the machine: a run that starts its own would have another child.
    assert "3 of 9 stages ran" in project.cli("run", *SMALL, env={"RAYKEEL_SCRIBE_IDLE_S": "120"})
    served = project.ready()
    run = start(project, *SMALL, "stages.train.max_steps=5000")
    wait_for_step(project, run)
    assert training_processes(project)  # the control: there is something to leave behind
    (worker,) = psutil.Process(run.pid).children()
    assert held(project)
    begun = time.monotonic()
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=15) == 130
    assert time.monotonic() - begun < 15
    assert project.ready() == served
    assert list((project.state / "store" / "staging").iterdir()) == []
    assert held(project) == []
    assert not psutil.pid_exists(worker.pid)
    assert not training_processes(project)
    assert left_on_the_cluster(project) == {"groups": [], "cpus": 3.5}  # 4, less what the endpoint holds
    killed = [r for r in project.runs("quickstart") if r.info.status == "KILLED"]
    assert {r.data.tags["mlflow.runName"].split()[0] for r in killed} == {"quickstart", "train"}
    # The same again, by somebody who does not wait: 3 s, and Ray itself clears away what its dead driver had.
    before = len(metric_lines(project))
    run = start(project, *SMALL, "stages.train.max_steps=5000")
    wait_for_step(project, run, before + 2)
    assert training_processes(project)
    run.send_signal(signal.SIGINT)
    begun = time.monotonic()
    time.sleep(0.2)
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=15) == 130 and time.monotonic() - begun < 3
    assert left_on_the_cluster(project) == {"groups": [], "cpus": 3.5}
    assert not training_processes(project) and project.ready() == served


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.faults
def test_a_killed_driver_resumes_and_ends_with_the_weights_of_an_undisturbed_run(
    tokenized: Project, tmp_path: Path
) -> None:
    project = tokenized
    undisturbed = tmp_path / "undisturbed"  # a store of its own
    shutil.copytree(project.state / "store", undisturbed)
    options = [*SMALL, "run.until=train", "stages.train.max_steps=60", "stages.train.resources.checkpoint_every=5"]
    run = start(project, *options)
    wait_for_step(project, run, at_least=12)
    run.kill()
    run.wait()
    assert "train" not in records(project)  # the control: it was killed in the middle
    assert "1 of 4 stages ran" in project.cli("run", *options)
    assert "1 of 4 stages ran" in project.cli("run", *options, f"store.root={undisturbed.as_uri()}")
    assert digests(project.state / "store")["train"] == digests(undisturbed)["train"]
    assert "RUNNING" not in {r.info.status for r in project.runs("quickstart")}


def start(project: Project, *overrides: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "pipelines", "run", f"state={project.state}", *overrides]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def metric_lines(project: Project) -> list[str]:
    """What training has written of its loss, over all attempts."""
    files = project.state.glob("store/work/*/metrics.jsonl")
    return [line for path in files for line in path.read_text().splitlines() if '"loss"' in line]


def wait_for_step(project: Project, run: "subprocess.Popen[bytes]", at_least: int = 2) -> None:
    """Until training has written its n-th line of metrics."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert run.poll() is None, "the run ended before it trained"
        if len(metric_lines(project)) >= at_least:
            return
        time.sleep(0.2)
    raise AssertionError("training did not begin")


def left_on_the_cluster(project: Project) -> dict[str, Any]:
    """Placement groups that are not removed, and free CPUs, as Ray itself counts them (given 15 s to settle)."""
    script = (
        "import json, sys, time; from pathlib import Path; from pipelines import cluster; from pipelines.config import ClusterConfig\n"
        "with cluster.connect(ClusterConfig(), Path(sys.argv[1])):\n"
        "    import ray; from ray.util import placement_group_table\n"
        "    end = time.monotonic() + 15\n"
        "    while True:\n"
        "        groups = [g['state'] for g in placement_group_table().values() if g['state'] != 'REMOVED']\n"
        "        cpus = ray.available_resources().get('CPU', 0.0)\n"
        "        if (not groups and cpus >= 3.5) or time.monotonic() > end: break\n"
        "        time.sleep(0.2)\n"
        "    print(json.dumps({'groups': groups, 'cpus': cpus}))"
    )
    command = [sys.executable, "-c", script, str(project.state)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=True)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def training_processes(project: Project) -> list[str]:
    """Names of Ray's training workers below this project's head."""
    names = [
        child.name() + " ".join(child.cmdline()[:1]) for child in psutil.Process(project.head).children(recursive=True)
    ]
    return [name for name in names if "RayTrainWorker" in name or "TrainController" in name]
