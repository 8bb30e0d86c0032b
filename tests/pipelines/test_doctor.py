"""`make doctor`: each line finds the trouble that it is there for, says what to do, and leaves nothing behind."""

import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipelines import doctor, machine, services
from pipelines.config import ROOT, AppConfig, ClusterConfig, ClusterMode, TrackingConfig, TrackingMode
from stages.deploy import DeployConfig
from tests.services import Service


@pytest.fixture
def app(tmp_path: Path) -> AppConfig:
    return AppConfig(name="stub", state=str(tmp_path / "state"))


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_sound_machine_has_no_problem_in_what_needs_no_service(app: AppConfig) -> None:
    for check in (
        machine.python,
        machine.cores,
        machine.memory,
        machine.disk,
        machine.clock,
        machine.temporary,
        services.store,
    ):
        line = check(app)
        assert line.state in ("ok", "warning") and line.found, check.__name__
    assert not Path(app.state).exists()  # looking makes nothing


def test_a_library_of_another_version_is_named(app: AppConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        (ROOT / "pyproject.toml")
        .read_text()
        .replace('"psutil>=7"', '"psutil>=99"')
        .replace('"rich>=14"', '"nowhere>=1"')
    )
    (tmp_path / "pyproject.toml").write_text(text)
    (tmp_path / "constraints.txt").write_text("")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    line = machine.python(app)
    assert line.state == "problem" and "psutil" in line.found and ">=99" in line.found
    assert "nowhere is not installed" in line.found and line.advice == "run make setup"


def test_a_taken_port_is_a_warning_with_the_way_out(app: AppConfig, taken_port: int) -> None:
    app.stages["deploy"] = DeployConfig(port=taken_port)
    line = machine.ports(app)
    assert line.state == "warning" and f"{taken_port} for deploy" in line.found and "stages.deploy.port=" in line.advice


def test_a_long_temporary_directory_is_a_problem_before_ray_meets_it(
    app: AppConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 110)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    line = machine.temporary(app)
    assert line.state == "problem" and "of 45 bytes" in line.found and line.advice == "set TMPDIR=/tmp"


def test_a_dead_server_and_a_locked_file_are_told_apart(app: AppConfig, tmp_path: Path, taken_port: int) -> None:
    assert services.tracking(app).state == "ok"  # nothing yet
    database = tmp_path / "state" / "mlflow" / "mlflow.db"
    database.parent.mkdir(parents=True)
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE t (x)")
    assert "1 tables, takes a write" in services.tracking(app).found
    app.tracking = TrackingConfig(mode=TrackingMode.server, uri="http://bob:CANARY@127.0.0.1:9", timeout_s=2.0)
    line = services.tracking(app)
    assert line.state == "problem" and "127.0.0.1:9" in line.found and "CANARY" not in line.found


@pytest.mark.slow
def test_a_locked_database_is_a_problem_within_the_limit(app: AppConfig, tmp_path: Path) -> None:
    database = tmp_path / "state" / "mlflow" / "mlflow.db"
    database.parent.mkdir(parents=True)
    holder = sqlite3.connect(database, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    line = services.tracking(app)
    holder.close()
    assert line.state == "problem" and "locked" in line.found


def test_an_object_store_is_tried_for_real(app: AppConfig, s3: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    app.store.root = "s3://store/doctor"
    line = services.store(app)
    assert line.state == "ok" and "create-if-absent kept" in line.found
    from pipelines.store import Store

    assert Store.open(app).bucket.entries("") == []
    app.store.root = "s3://nobodys-bucket/doctor"
    line = services.store(app)
    assert line.state == "problem" and "nobodys-bucket" in line.found


def test_a_dead_attach_address_is_a_problem(app: AppConfig) -> None:
    app.cluster = ClusterConfig(mode=ClusterMode.attach, address="127.0.0.1:9", connect_timeout_s=2.0)
    line = services.ray(app)
    assert line.state == "problem" and "127.0.0.1:9" in line.found


@pytest.mark.ray
@pytest.mark.slow
def test_the_command_ends_with_0_and_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    mark = {"RAYKEEL_DOCTOR_TEST": tmp_path.name}
    command = [sys.executable, "-m", "pipelines", "doctor", f"state={tmp_path / 'state'}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, env={**os.environ, **mark})
    assert run.returncode == 0, run.stdout + run.stderr
    assert "answered a task" in run.stdout and len(run.stdout.splitlines()) == len(doctor.CHECKS)
    assert list(tmp_path.iterdir()) == []

    def ours(process: psutil.Process) -> bool:
        try:
            return process.environ().get("RAYKEEL_DOCTOR_TEST") == tmp_path.name
        except (psutil.Error, OSError):
            return False

    left = [p for p in psutil.process_iter() if ours(p)]
    _, alive = psutil.wait_procs(left, timeout=10)
    assert alive == []


def test_a_problem_gives_exit_code_5(tmp_path: Path) -> None:
    """Everything else is run too: one problem hides no other line."""
    command = [sys.executable, "-m", "pipelines", "doctor", f"state={tmp_path}", "cluster=attach"]
    command += ["cluster.address=127.0.0.1:9", "cluster.connect_timeout_s=2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 5, run.stdout + run.stderr
    assert run.stderr.splitlines()[-1] == "raykeel exited with code 5"
    assert len(run.stdout.splitlines()) == len(doctor.CHECKS) and list(tmp_path.iterdir()) == []
