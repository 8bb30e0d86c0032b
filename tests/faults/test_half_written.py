"""SIGKILL in the middle of writing, depositing and publishing: what is half there is never taken for a result, and is removed; what
is whole stays.
"""

import random
import signal
from pathlib import Path

import psutil
import pytest

from pipelines.lease import Lease
from pipelines.store import IntegrityError
from stages.artifacts import MANIFEST
from stages.storage.hashing import sha256_file, tree_digest
from tests.faults.project import Project
from tests.faults.stages import PARTS

pytestmark = [pytest.mark.faults, pytest.mark.slow]

QUIET = {"quiet": True}
"""These tests are about bytes: MLflow's two seconds a process are spared."""
MADE = ("gather", "expand", "weigh")
# Files that `deposit` brings to the disk one after the other: parts, summary, two directories, the manifest, and the place it moved to.
SYNCS = PARTS + 1 + 2 + 1 + 1


def struck_at(seed: int, points: tuple[str, ...]) -> dict[str, object]:
    """Where the kill falls: any stage, any moment of its writing, any victim."""
    choose = random.Random(seed)
    point = points[seed % len(points)]
    syncs = SYNCS - ("upload" in points)  # an object store has no directory to move into
    last = {"part": PARTS, "sync": syncs, "upload": PARTS + 2}[point]
    return {
        "stage": choose.choice(MADE),
        "point": point,
        "count": choose.randint(1, last),
        "who": choose.choice(["worker", "driver", "machine"]),
    }


def strike(project: Project, undisturbed: dict[str, str], die: dict[str, object]) -> None:
    print(f"killed at {die}")  # pytest shows it when the test fails
    stage = str(die["stage"])
    code = 2 if die["who"] == "worker" else -signal.SIGKILL
    said = project.run("run.until=weigh", faults={**QUIET, "die": die}, expect=code)
    assert code < 0 or "was killed by signal 9" in said
    # The control: it died in that stage, before it was published, and what came before it stands.
    assert project.executions == list(MADE[: MADE.index(stage) + 1])
    assert set(project.published) == set(MADE[: MADE.index(stage)])
    project.require_sound()
    project.run("run.until=weigh", faults=QUIET)
    assert project.executions == [*MADE[: MADE.index(stage) + 1], *MADE[MADE.index(stage) :]]
    assert project.published == {name: undisturbed[name] for name in MADE}
    project.require_sound()
    project.require_tidy()
    assert len(project.store.bucket.children("objects")) == len(MADE)


@pytest.mark.parametrize("seed", range(12))
def test_a_kill_while_parts_are_written_or_brought_to_the_disk(
    project: Project, undisturbed: dict[str, str], seed: int
) -> None:
    strike(project, undisturbed, struck_at(seed, ("part", "sync")))


@pytest.mark.parametrize("stored", ["s3"], indirect=True)
@pytest.mark.parametrize("seed", range(100, 108))
def test_a_kill_while_files_are_written_or_uploaded_to_an_object_store(
    stored: Project, undisturbed: dict[str, str], seed: int
) -> None:
    strike(stored, undisturbed, struck_at(seed, ("upload", "upload", "part", "sync")))


def test_what_was_left_half_written_is_removed_and_nothing_else(project: Project) -> None:
    """Four attempts die at different moments; other hosts' and live processes' staging, and results, stay."""
    store = project.store
    project.run("run.until=gather", faults=QUIET)
    kept = project.published["gather"]
    for count in (1, 3):
        die = {"stage": "expand", "point": "part", "count": count, "who": "machine"}
        project.run("run.until=expand", faults={**QUIET, "die": die}, expect=-signal.SIGKILL)
        left = [path for path in (store.scratch / "staging").iterdir()]
        assert len(left) == 1 and len(list(left[0].rglob("part-*"))) == count  # the control; the one before was swept
    others = store.scratch / "staging" / "0123456789abcdef.elsewhere.4242.abcd1234"
    ours = store.staging_directory("f" * 64)  # of this process, which lives
    for path in (others, ours):
        path.mkdir(parents=True)
    store.sweep_staging()
    assert {path.name for path in (store.scratch / "staging").iterdir()} == {others.name, ours.name}
    assert set(project.published.values()) == {kept} and not psutil.pid_exists(4242)


@pytest.mark.parametrize("stored", ["s3"], indirect=True)
def test_an_object_whose_upload_was_cut_is_not_read_and_gc_removes_it(stored: Project) -> None:
    die = {"stage": "gather", "point": "upload", "count": 2, "who": "machine"}
    stored.run("run.until=gather", faults={**QUIET, "die": die}, expect=-signal.SIGKILL)
    store = stored.store
    (half,) = store.bucket.children("objects")
    files = [entry.key.rpartition("/")[2] for entry in store.bucket.entries(f"objects/{half}")]
    assert len(files) == 2 and MANIFEST not in files  # the control: two of its files are there, and no manifest
    assert stored.published == {}
    # Another result is made, whose object must stay.
    stored.run("run.until=gather", "stages.gather.value=9", faults=QUIET)
    kept = stored.published["gather"]
    assert set(store.bucket.children("objects")) == {half, kept}
    said = stored.run("store.keep_runs=1", env={"APPLY": "1"}, verb="gc")
    assert "objects without a record" in said
    assert store.bucket.children("objects") == [kept] and stored.published == {"gather": kept}


def test_three_forced_executions_give_one_object_with_equal_rows(project: Project) -> None:
    seen = []
    for _ in range(3):
        project.run("run.until=expand", "run.rerun=[expand]", faults=QUIET)
        digest = project.published["expand"]
        directory = project.store.object_directory(digest)
        assert directory is not None
        rows = sum(len(part.read_text().splitlines()) for part in (directory / "rows").iterdir())
        files = {p.relative_to(directory).as_posix(): sha256_file(p) for p in directory.rglob("*") if p.is_file()}
        files.pop(MANIFEST)
        seen.append((digest, rows, tree_digest(files)))
    assert project.executions.count("expand") == 3  # the control: it was not reused
    assert len(set(seen)) == 1 and seen[0][1] == 100 * PARTS and seen[0][0] == seen[0][2]
    assert len(project.store.bucket.children("objects")) == 2  # gather's and expand's
    fences = sorted(record.fence for record in project.store.records())
    assert fences == [1, 3]  # three slots, the newest is the one that is found


def test_a_record_is_never_made_for_an_object_that_is_gone(stored: Project) -> None:
    """Equal content of an older result is found in place and not written again; `make gc` may take it before the record is made."""
    store = stored.store
    store.prepare()
    staged = store.staging_directory("f" * 64)
    staged.mkdir(parents=True)
    (staged / "data").write_text("equal")
    with Lease.acquire(store.bucket, "f" * 64, lambda who: None, 1.0) as lease:
        deposit = store.deposit(staged)
        assert store.bucket.children("objects") == [deposit.digest]  # the control
        store.bucket.delete(entry.key for entry in store.bucket.entries(f"objects/{deposit.digest}"))
        with pytest.raises(IntegrityError, match="was removed before it was published"):
            store.publish(deposit, "f" * 64, {}, {}, lease)
    assert list(store.records()) == []


def test_an_object_that_is_in_the_way_is_set_aside(stored: Project) -> None:
    """Half an object, as a cut upload leaves it, or one whose bytes rotted: equal content that is made again takes its place."""
    store = stored.store
    store.prepare()

    def staged() -> Path:
        place = store.staging_directory("f" * 64)
        place.mkdir(parents=True)
        for name in ("one", "two"):
            (place / name).write_text(name)
        return place

    digest = store.deposit(staged()).digest
    store.bucket.put(f"objects/{digest}/one", b"not")
    store.bucket.delete([f"objects/{digest}/two"])
    with pytest.raises(IntegrityError):
        store.verify(digest)  # the control
    assert store.deposit(staged()).digest == digest
    store.verify(digest, deep=True)
    (place,) = store.bucket.children("quarantine")
    assert store.bucket.get(f"quarantine/{place}/object/one") == b"not"
