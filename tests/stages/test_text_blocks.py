"""Work in Ray's tasks: at once from the first moment, and in the ways that the next versions of Ray still know."""

import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from stages.contract import StageError
from stages.text.blocks import references, results


@dataclass
class Spread:
    blocks: int = 2

    def inline(self) -> bool:
        return False


def doubled(order: dict[str, Any], shared: int) -> Iterator[pyarrow.Table]:
    yield pyarrow.table({"number": [2 * order["number"] + shared], "process": [os.getpid()]})


@pytest.mark.ray
def test_work_is_given_to_ray_without_anything_that_it_will_take_away(ray_session: None) -> None:
    from ray.util.annotations import RayDeprecationWarning

    with warnings.catch_warnings():
        warnings.simplefilter("error", RayDeprecationWarning)
        tables = list(results([{"number": n} for n in range(4)], doubled, Spread(), shared=1))
    assert sorted(row["number"] for table in tables for row in table.to_pylist()) == [1, 3, 5, 7]
    assert os.getpid() not in {row["process"] for table in tables for row in table.to_pylist()}


def met(order: dict[str, Any], place: Path) -> Iterator[pyarrow.Table]:
    (place / str(order["number"])).touch()
    until = time.monotonic() + 60
    while len(list(place.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    yield pyarrow.table({"together": [len(list(place.iterdir()))], "ended": [time.monotonic()]})


@pytest.mark.ray
def test_two_orders_run_at_once_however_short_they_are(ray_session: None, tmp_path: Path) -> None:
    list(results([{"number": n} for n in range(2)], doubled, Spread(), shared=1))  # both workers are up
    (table, other) = results([{"number": n} for n in range(2)], met, Spread(), place=tmp_path)
    rows = [*table.to_pylist(), *other.to_pylist()]
    assert [row["together"] for row in rows] == [2, 2]
    assert abs(rows[0]["ended"] - rows[1]["ended"]) < 10


def failing(order: dict[str, Any]) -> Iterator[pyarrow.Table]:
    if order["number"] == 0:
        raise StageError("rows.jsonl:7: found no text, wanted some")
    time.sleep(120)
    yield pyarrow.table({"number": [order["number"]]})


@pytest.mark.ray
@pytest.mark.parametrize("run", [lambda *how: list(results(*how)), references])
def test_what_one_order_says_is_told_at_once_and_as_it_was_said(ray_session: None, run: Any) -> None:
    began = time.monotonic()
    with pytest.raises(StageError, match=r"^rows\.jsonl:7: found no text, wanted some$"):
        run([{"number": n} for n in range(2)], failing, Spread())
    assert time.monotonic() - began < 60
