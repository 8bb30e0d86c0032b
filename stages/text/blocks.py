"""Runs work on Ray Data, quietly, and hands back the small tables it returns. Apart, because clean and tokenize do.

Work is cut into orders (a range of rows, a shard to write), never into what the data look like, so that the number of
blocks decides only how much runs at once. Workers read and write the shards themselves: no row payload reaches the driver.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pyarrow
import ray.data
import ray.exceptions

from stages.artifacts import ArtifactError
from stages.contract import StageError
from stages.storage.node import here

Order = dict[str, Any]
Work = Callable[..., Iterator[pyarrow.Table]]


def results(orders: Sequence[Order], work: Work, blocks: int, **shared: Any) -> Iterator[pyarrow.Table]:
    """The tables that `work(order, **shared)` yields for each order, as they come; at most `blocks` orders run at once."""
    with _quiet(), _plain_errors():
        dataset = _dataset(orders, work, blocks, shared)
        yield from dataset.iter_batches(batch_format="pyarrow", batch_size=None)


def references(orders: Sequence[Order], work: Work, blocks: int, **shared: Any) -> list["ray.ObjectRef[pyarrow.Table]"]:
    """The same, left where they were made: references for the tasks that read them."""
    with _quiet(), _plain_errors():
        return list(_dataset(orders, work, blocks, shared).to_arrow_refs())


def ranges(total: int, parts: int) -> list[Order]:
    """0..total cut into at most `parts` ranges of nearly equal size: {"first": 0, "last": 17}, ..."""
    parts = max(min(parts, total), 1)
    edges = [total * part // parts for part in range(parts + 1)]
    return [{"first": first, "last": last} for first, last in pairwise(edges)]


def _dataset(orders: Sequence[Order], work: Work, blocks: int, shared: dict[str, Any]) -> "ray.data.Dataset":
    dataset = ray.data.from_items(list(orders), override_num_blocks=min(blocks, len(orders)))
    return dataset.map_batches(
        _carry_out,
        batch_size=1,
        batch_format="pyarrow",
        zero_copy_batch=True,
        fn_kwargs={"work": work, "shared": shared},
        scheduling_strategy=here(),
    )


def _carry_out(batch: pyarrow.Table, work: Work, shared: dict[str, Any]) -> Iterator[pyarrow.Table]:
    yield from work(batch.to_pylist()[0], **shared)


@contextmanager
def _quiet() -> Iterator[None]:
    """No bars and no start and end lines on the console; Ray Data's own log file keeps them."""
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logger = logging.getLogger("ray.data")
    for handler in logger.handlers:
        if not isinstance(handler, logging.FileHandler) and handler.level < logging.ERROR:
            handler.setLevel(logging.ERROR)
    with ray.data.DataContext.current(context):
        yield


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What a worker tells the user reaches the user as it was said, without Ray's frames around it."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, StageError | ArtifactError):
            raise error.cause from None
        raise
