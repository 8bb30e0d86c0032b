"""What is said while bytes move."""

import time
from pathlib import Path
from typing import Any

import pytest

from pipelines import signs
from stages.artifacts import Rows

DIGEST = "d" * 64


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "EVERY_S", 0.05)


def test_while_something_is_stored_it_says_so_and_no_longer() -> None:
    said: list[Any] = []
    with signs.moving(lambda *message: said.append(message), 1.0, "storing"):
        time.sleep(0.3)
    count = len(said)
    time.sleep(0.2)
    assert count >= 2 and len(said) == count and set(said) == {("progress", 1.0, "storing")}


def test_a_copy_that_grows_is_a_sign_and_one_that_does_not_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYKEEL_CACHE", str(tmp_path))
    partial = tmp_path / "objects" / f".{DIGEST}.12345678" / "data" / "part"
    partial.parent.mkdir(parents=True)
    said: list[Any] = []
    remote, here = Rows(uri=f"s3://store/objects/{DIGEST}"), Rows(uri=tmp_path.as_uri())
    with signs.arriving(lambda *message: said.append(message), [remote, here]) as heard:
        heard("progress", 0.25, "the stage's own")
        for size in (1, 2, 3):
            partial.write_bytes(b"x" * size * 2**20)
            deadline = time.monotonic() + 5
            while said[-1][2] != f"fetching inputs: {size} MB" and time.monotonic() < deadline:
                time.sleep(0.02)
            assert said[-1] == ("progress", 0.25, f"fetching inputs: {size} MB")
        count = len(said)
        time.sleep(0.3)
        assert len(said) == count
    with signs.arriving(lambda *message: said.append(message), [here]):
        partial.write_bytes(b"x")
        time.sleep(0.2)
    assert len(said) == count
