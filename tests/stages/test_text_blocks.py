"""Work on Ray Data: in the ways that the next versions of Ray still know."""

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow
import pytest

from stages.text.blocks import results


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
