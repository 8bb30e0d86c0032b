"""Full disks, read-only places, long and odd paths (R-11, R-22, R-26): refused early with place, number and key, or it works; nothing is
half published, the database stays whole, and the same command works when there is room.
"""

import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.config import ROOT
from tests.faults.conftest import project_in
from tests.faults.places import fill, read_only, small_disk
from tests.faults.project import Project
from tests.faults.stages import STAGES

pytestmark = [pytest.mark.faults, pytest.mark.slow]

REFUSED_S = 5.0
"""From the shell's point of view, on two busy cores: the interpreter starts within it."""


def integrity(project: Project) -> str:
    with sqlite3.connect(project.state / "mlflow" / "mlflow.db") as database:
        return str(database.execute("PRAGMA integrity_check").fetchone()[0])


def refused(project: Project, expect: int, *overrides: str, env: dict[str, str] | None = None) -> str:
    """What it says when it refuses, soon and before any stage."""
    begun = time.monotonic()
    said = project.run(*overrides, expect=expect, env=env)
    assert time.monotonic() - begun < REFUSED_S
    assert project.executions == [] and f"raykeel exited with code {expect}" in said and "Traceback" not in said
    return said


# what is full before it starts


@pytest.mark.parametrize("what", ["store", "state", "mlflow", "artifacts"])
def test_a_disk_without_room_is_refused_and_named(
    project: Project, undisturbed: dict[str, str], tmp_path: Path, what: str
) -> None:
    place, key = {
        "store": (tmp_path / "small" / "store", "store.root"),
        "state": (project.state, "state"),
        "mlflow": (project.state / "mlflow", "state"),
        "artifacts": (project.state / "mlflow" / "artifacts", "state"),
    }[what]
    project.root = (place if what == "store" else tmp_path / "roomy").as_uri()
    with small_disk(place):
        said = refused(project, 5)
        assert "MB free, at least 200 MB are needed" in said and f"set {key}=" in said and str(place) in said
        assert project.published == {}
        assert integrity(project) == "ok"
    if what in ("state", "mlflow"):  # the small disk went with all that was on it
        project = project_in(tmp_path / "again", template_of(project))
        project.root = (tmp_path / "roomy").as_uri()
    project.run()
    assert project.published == undisturbed


def template_of(project: Project) -> Path:
    return (
        project.state.with_name("state.before") if project.state.with_name("state.before").exists() else project.state
    )


# what fills while it runs


IMPATIENT = """
from pipelines import journal, registering
registering.PATIENCE_S, journal.CLOSE_TIMEOUT_S = 8.0, 10.0
"""
"""A full disk ends a run as it would after 70 s and 30 s, which the tests of a locked database wait for (tests/pipelines)."""


def impatient(place: Path) -> dict[str, str]:
    """An environment in which the driver and its scribe give MLflow up soon."""
    place.mkdir()
    (place / "sitecustomize.py").write_text(IMPATIENT)
    return {"PYTHONPATH": f"{place}:{ROOT}"}


@pytest.mark.parametrize("what", ["store", "state"])
def test_a_disk_that_fills_during_a_stage_publishes_nothing_and_the_rerun_is_right(
    project: Project, undisturbed: dict[str, str], tmp_path: Path, what: str
) -> None:
    place = tmp_path / "small" if what == "store" else project.state
    with small_disk(place, 300):
        project.root = (place / "store" if what == "store" else tmp_path / "roomy").as_uri()
        hold = tmp_path / "go"
        running = project.start(faults={"hold": {"expand": str(hold)}}, env=impatient(tmp_path / "impatient"))
        project.await_event("expand begin", running)
        ballast = fill(place)
        hold.touch()
        said, _ = running.communicate(timeout=90)
        assert running.returncode in (2, 5), said
        print(said)  # shown when it fails
        assert "o space left" in said and str(place) in said and "0 MB free" in said and "Traceback" not in said
        # What was made on a full disk is not published; a store elsewhere took what was made, whole.
        assert set(project.published) == ({"gather"} if what == "store" else {"gather", "expand", "weigh"})
        project.require_sound()
        assert integrity(project) == "ok"
        ballast.unlink()
        project.run()
        assert project.published == undisturbed
        assert integrity(project) == "ok"
        told = project.runs()
        assert "RUNNING" not in {status for _, status, _ in told}


def test_a_small_temporary_directory_is_refused_and_a_full_one_is_stepped_around(
    project: Project, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    """Ray's sockets and logs would stand there."""
    with small_disk(tmp_path / "small") as place:
        said = refused(project, 5, env={"TMPDIR": str(place)})
        assert str(place) in said and "at least 200 MB are needed" in said and "set TMPDIR=" in said
        fill(place)  # Python itself takes the next temporary directory then
        project.run(env={"TMPDIR": str(place)})
        assert project.published == undisturbed


#


@pytest.mark.parametrize("what", ["store", "state", "mlflow"])
def test_a_read_only_place_is_refused_with_its_key(
    project: Project, undisturbed: dict[str, str], tmp_path: Path, what: str
) -> None:
    project.root = (tmp_path / "store").as_uri()
    place = {"store": tmp_path / "store", "state": project.state, "mlflow": project.state / "mlflow"}[what]
    key = "store.root" if what == "store" else "state"
    with read_only(place):
        said = refused(project, 1)
        assert f"{key}=" in said and str(place) in said and "Read-only file system" in said
    project.run()
    assert project.published == undisturbed


def test_a_read_only_home_is_not_needed_with_a_store_of_ones_own(
    project: Project, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    with read_only(tmp_path / "home") as home:
        with pytest.raises(OSError):
            (home / "control").touch()
        project.run(env={"HOME": str(home)})
        assert project.published == undisturbed and list(home.iterdir()) == []


@pytest.mark.parametrize("stored", ["s3"], indirect=True)
def test_a_read_only_home_is_named_when_copies_of_an_object_store_go_there(stored: Project, tmp_path: Path) -> None:
    del stored.env["RAYKEEL_CACHE"]
    with read_only(tmp_path / "home") as home:
        env = {"HOME": str(home), "RAYKEEL_CACHE": ""}
        said = refused(stored, 1, env=env)
        assert "RAYKEEL_CACHE=" in said and str(home) in said


def test_a_read_only_temporary_directory_is_stepped_around(
    project: Project, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    with read_only(tmp_path / "tmp") as place:
        project.run(env={"TMPDIR": str(place)})
        assert project.published == undisturbed


def test_read_only_data_is_read(project: Project, tmp_path: Path) -> None:
    """A store that somebody else filled, on a disk that nobody may write: everything is a hit."""
    project.run("run.until=weigh")
    with read_only(project.state / "store"):
        said = project.run("run.until=weigh")
        assert "nothing changed" in said
        assert "reuse" in project.run("run.until=weigh", verb="plan")
        project.run(verb="status")
        project.run(verb="verify")


#


@pytest.mark.parametrize("name", ["with space and äccent ü", "d" * 110])
def test_a_state_root_of_any_name_works(
    tmp_path: Path, with_schema: Path, undisturbed: dict[str, str], name: str
) -> None:
    project = project_in(tmp_path / name, with_schema)

    def run(verb: str = "run") -> str:
        process = project.start(command=[quoted(word) for word in project.command(verb=verb)])
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        return said

    run()
    assert project.published == undisturbed
    project.require_sound()
    assert "nothing is broken" in run("verify")
    assert "nothing changed" in run()


@pytest.mark.parametrize("name", ["50%", "a#b", "what?"])
def test_a_state_root_that_a_database_address_cannot_hold_is_refused(
    tmp_path: Path, with_schema: Path, name: str
) -> None:
    project = project_in(tmp_path / name, with_schema)
    process = project.start(command=[quoted(word) for word in project.command()])
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "MLflow cannot keep its database" in said and name in said


def quoted(word: str) -> str:
    """Hydra wants odd paths in quotes."""
    key, equals, value = word.partition("=")
    return f"{key}='{value}'" if equals and key == "state" else word


@pytest.mark.ray
def test_a_long_temporary_directory_is_refused_before_ray_starts(tmp_path: Path) -> None:
    long = tmp_path / ("t" * 110)
    long.mkdir()
    begun = time.monotonic()
    command = [sys.executable, "-m", "pipelines", "run", f"state={tmp_path / 'state'}", "run.limit=50"]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, env={**os.environ, "TMPDIR": str(long)}
    )
    assert run.returncode == 5 and time.monotonic() - begun < 2 * REFUSED_S, run.stdout + run.stderr
    assert "too long for Ray's sockets" in run.stderr and "> 45 bytes" in run.stderr and "TMPDIR=/tmp" in run.stderr


@pytest.mark.ray
def test_sixty_four_megabytes_of_shared_memory_are_enough(tmp_path: Path) -> None:
    """In a mount namespace of its own: nobody else's shared memory shrinks."""
    said = connect(tmp_path / "state", {}, shared_memory_mb=64)
    assert "64 MB of shared memory" in said and "answered 8388608" in said


def connect(state: Path, env: dict[str, str], shared_memory_mb: int | None = None) -> str:
    """Ray through our own door: one task returns 8 MB. What happened, in words."""
    script = (
        "import shutil, sys; from pathlib import Path; from pipelines import cluster\n"
        "from pipelines.config import ClusterConfig, ClusterMode\n"
        "from stages.contract import ResourcesUnavailable\n"
        "print(shutil.disk_usage('/dev/shm').total // 2**20, 'MB of shared memory')\n"
        "try:\n"
        "    with cluster.connect(ClusterConfig(mode=ClusterMode.ephemeral), Path(sys.argv[1])):\n"
        "        import ray\n"
        "        print('answered', len(ray.get(ray.remote(lambda: bytes(8 * 2**20)).remote(), timeout=60)))\n"
        "except ResourcesUnavailable as error:\n"
        "    print('refused', error)\n"
    )
    command = [sys.executable, "-c", script, str(state)]
    if shared_memory_mb is not None:
        if os.geteuid() != 0:
            pytest.skip("a mount namespace needs root: this fault was not tried")
        mount = f'mount -t tmpfs -o size={shared_memory_mb}m tmpfs /dev/shm && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", mount, "sh", *command]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, env={**os.environ, **env})
    return run.stdout + run.stderr[-2000:]


def test_the_stages_are_those_that_the_undisturbed_run_has(undisturbed: dict[str, str]) -> None:
    assert set(undisturbed) == set(STAGES)
