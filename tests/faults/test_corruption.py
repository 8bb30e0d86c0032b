"""Stored bytes that change (R-17): found before anything reads them, told by the file's name, set aside, made again; a changed time alone
is nothing.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.project import Project
from tests.faults.stages import STAGES

pytestmark = [pytest.mark.faults, pytest.mark.slow]

PART, OTHER = "rows/part-00000.parquet", "rows/part-00001.parquet"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def delete(path: Path) -> None:
    path.unlink()


def swap(path: Path) -> None:
    other, between = path.parent / Path(OTHER).name, path.parent / "between"
    assert other.stat().st_size == path.stat().st_size and other.read_bytes() != path.read_bytes()  # the control
    path.rename(between)
    other.rename(path)
    between.rename(other)


QUIET = {"quiet": True}
"""These tests are about bytes: MLflow's two seconds a process are spared."""
DAMAGES = [flip, cut, empty, delete, swap]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: str(damage.__name__))
def test_a_damaged_file_is_named_set_aside_and_made_again(
    project: Project, undisturbed: dict[str, str], damage: Callable[[Path], None]
) -> None:
    project.run("run.until=weigh", faults=QUIET)
    victim = project.state / "store" / "objects" / project.published["expand"] / PART
    damage(victim)
    assert victim.parent.parent.name in project.run("run.until=weigh", verb="verify", expect=6).replace(
        "\n", ""
    )  # the control
    said = project.run("run.until=weigh", faults=QUIET)
    assert "warning:" in said and "set aside in" in said
    assert PART in said or (damage is swap and OTHER in said)
    # Its reader ran once, on whole bytes; the damaged ones never reached it.
    assert project.executions == ["gather", "expand", "weigh", "expand"]
    assert project.published == {name: undisturbed[name] for name in STAGES[:3]}
    project.require_sound()
    (place,) = project.store.bucket.children("quarantine")
    assert project.store.bucket.entries(f"quarantine/{place}/object") != []
    assert "nothing changed" in project.run("run.until=weigh", faults=QUIET)


@pytest.mark.parametrize("file", ["summary.json", "MANIFEST.json"])
def test_damage_of_the_small_files_is_found_too(project: Project, undisturbed: dict[str, str], file: str) -> None:
    project.run("run.until=weigh", faults=QUIET)
    flip(project.state / "store" / "objects" / project.published["gather"] / file)
    assert file in project.run("run.until=weigh", faults=QUIET)
    assert project.executions == ["gather", "expand", "weigh", "gather"]
    assert project.published["weigh"] == undisturbed["weigh"]


def test_a_changed_time_alone_is_still_a_hit(project: Project) -> None:
    project.run("run.until=weigh", faults=QUIET)
    for path in (project.state / "store" / "objects").rglob("*"):
        os.utime(path, (1, 1))
    assert "nothing changed" in project.run("run.until=weigh", faults=QUIET)
    assert project.executions == ["gather", "expand", "weigh"]


def test_a_damaged_record_is_made_again(project: Project, undisturbed: dict[str, str]) -> None:
    project.run("run.until=weigh", faults=QUIET)
    record = next(r for r in project.store.records() if r.payload["stage"] == "expand")
    (project.state / "store" / "results" / record.fingerprint / f"{record.fence:06d}.json").write_text("{")
    said = project.run("run.until=weigh", faults=QUIET)
    assert "unreadable record" in said and project.published["expand"] == undisturbed["expand"]
