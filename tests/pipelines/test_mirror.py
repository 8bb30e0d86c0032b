"""Resumable state in the store: what another attempt finds, and what a node that was given up cannot spoil."""

from pathlib import Path

import pytest

from pipelines.mirror import Mirror
from stages.storage.bucket import Bucket, BucketError

STEP = "checkpoints/step-00000005"


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket((tmp_path / "store").as_uri())


def attempt(bucket: Bucket, node: Path, fence: int, number: int = 1) -> tuple[Mirror, Path]:
    """One that begins on a node: its mirror and its `work`."""
    mirror = Mirror(bucket, node / "f", fence, number)
    mirror.fetch()
    return mirror, node / "f"


def write(work: Path, **files: str) -> None:
    for name, text in files.items():
        path = work / STEP / name.replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_next_attempt_begins_as_the_last_one_was_mirrored(bucket: Bucket, tmp_path: Path) -> None:
    first, work = attempt(bucket, tmp_path / "one", 1)
    write(work, state_pt="weights", complete_json="{}")
    write(work.parent / "f" / ".writing-9", state_pt="half")
    first.bring()
    second, found = attempt(bucket, tmp_path / "two", 1, number=2)
    assert {p.relative_to(found).as_posix() for p in found.rglob("*") if p.is_file()} == {
        f"{STEP}/state.pt",
        f"{STEP}/complete.json",
    }
    assert (found / STEP / "state.pt").read_text() == "weights"
    (found / STEP / "state.pt").unlink()
    write(found, complete_json='{"step": 5}')
    second.bring()
    assert [e.key for e in bucket.entries("work")] == [  # the turn before is gone: it is whole in this one
        "work/f/000001-002/.mirrored",
        f"work/f/000001-002/{STEP}/complete.json",
    ]
    assert bucket.get(f"work/f/000001-002/{STEP}/complete.json") == b'{"step": 5}'


def test_a_node_that_was_given_up_neither_replaces_nor_removes_what_its_successor_has(
    bucket: Bucket, tmp_path: Path
) -> None:
    zombie, its = attempt(bucket, tmp_path / "one", 1)
    write(its, state_pt="old", complete_json="{}")
    zombie.bring()
    successor, ours = attempt(bucket, tmp_path / "two", 2)
    write(ours, state_pt="new", metrics_json="{}")
    successor.bring()
    write(its, state_pt="written by a zombie")
    (its / STEP / "complete.json").unlink()
    zombie.bring()
    _, third = attempt(bucket, tmp_path / "three", 3)
    assert (third / STEP / "state.pt").read_text() == "new" and (third / STEP / "complete.json").exists()
    # Nor does it begin from a turn that came after its own.
    _, late = attempt(bucket, tmp_path / "late", 1, number=2)
    assert not (late / STEP / "metrics.json").exists()


def test_half_a_turn_is_not_what_an_attempt_begins_from(bucket: Bucket, tmp_path: Path) -> None:
    first, work = attempt(bucket, tmp_path / "one", 1)
    write(work, state_pt="weights", complete_json="{}")
    first.bring()
    second, work = attempt(bucket, tmp_path / "two", 2)

    class Cut(Bucket):
        def upload(self, directory: Path, names: list[str], prefix: str) -> None:  # type: ignore[override]
            if names[0].endswith(".json"):
                raise BucketError("the node died here")
            super().upload(directory, names, prefix)

    second._bucket = Cut(bucket.uri)
    second.bring()
    assert [e.key for e in bucket.entries("work/f/000002-001")] == [f"work/f/000002-001/{STEP}/state.pt"]  # the control
    _, third = attempt(bucket, tmp_path / "three", 3)
    assert (third / STEP / "complete.json").read_text() == "{}"
