"""Work on Ray Data: at once from the first moment, and in the ways that the next versions of Ray still know."""

import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
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


def begun(order: dict[str, Any]) -> Iterator[pyarrow.Table]:
    at = time.monotonic()
    time.sleep(0.3)
    yield pyarrow.table({"at": [at]})


@pytest.mark.ray
def test_two_orders_begin_together(ray_session: None) -> None:
    gaps = []
    for _ in range(4):  # in the first both workers start; others may be late on a busy machine
        first, second = (
            row["at"] for t in results([{"number": n} for n in range(2)], begun, Spread()) for row in t.to_pylist()
        )
        gaps.append(abs(first - second))
    assert min(gaps[1:]) < 0.2, gaps


def failing(order: dict[str, Any]) -> Iterator[pyarrow.Table]:
    if order["number"] == 0:
        raise StageError("rows.jsonl:7: found no text, wanted some")
    time.sleep(120)
    yield pyarrow.table({"number": [order["number"]]})


@pytest.mark.ray
@pytest.mark.parametrize("run", [lambda *how: list(results(*how)), references])
def test_what_one_order_says_is_told_at_once_and_as_it_was_said(
    ray_session: None, run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    with pytest.raises(StageError, match=r"^rows\.jsonl:7: found no text, wanted some$"):
        run([{"number": n} for n in range(2)], failing, Spread())
    assert time.monotonic() - began < 60
    assert "Traceback" not in "".join(capfd.readouterr())
