"""Runs work on Ray Data, quietly, or in this process, and hands back the small tables it returns. Apart, because all stages
that read rows do.

Work is cut into orders (a range of rows, a shard to write), never into what the data look like, so that the number of
blocks decides only how much runs at once. Workers read and write the shards themselves: no row payload reaches the driver.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow

from stages.artifacts import ArtifactError
from stages.contract import StageError

if TYPE_CHECKING:
    import ray.data

Order = dict[str, Any]
Work = Callable[..., Iterator[pyarrow.Table]]
ACTOR_RESTARTS = 3
FACTS_SCHEMA = pyarrow.schema([("facts", pyarrow.string())])
"""Of the tables in which work tells what it counted: JSON."""


class Resources(Protocol):
    """How a stage spreads its work."""

    blocks: int

    def inline(self) -> bool: ...


def results(orders: Sequence[Order], work: Work, resources: Resources, **shared: Any) -> Iterator[pyarrow.Table]:
    """The tables that `work(order, **shared)` yields for each order, as they come; at most `blocks` orders run at once."""
    if resources.inline():
        for order in orders:
            yield from work(dict(order), **shared)
        return
    if not orders:
        return
    with _settled(), _plain_errors():
        dataset = _dataset(orders, work, resources.blocks, shared)
        yield from dataset.iter_batches(batch_format="pyarrow", batch_size=None)


class Pool(Protocol):
    """How a stage spreads work that needs something heavy in memory."""

    actors: int
    cpus: float

    def inline(self) -> bool: ...


def pooled(orders: Sequence[Order], make: Callable[..., Work], pool: Pool, **shared: Any) -> Iterator[pyarrow.Table]:
    """The tables that `make(**shared)(order)` yields for each order, as they come; `make` (which loads what is heavy) runs
    once in each of the pool's actors."""
    if pool.inline():
        work = make(**shared)
        for order in orders:
            yield from work(dict(order))
        return
    import ray.data

    from stages.storage.node import selector

    with _settled(), _plain_errors():
        dataset = ray.data.from_items(list(orders), override_num_blocks=len(orders)).map_batches(
            _Actor,
            fn_constructor_kwargs={"make": make, "shared": shared},
            # One order at a time: a queue behind one actor would leave the others idle at the end.
            compute=ray.data.ActorPoolStrategy(size=min(pool.actors, len(orders)), max_tasks_in_flight_per_actor=1),
            num_cpus=pool.cpus,
            batch_size=1,
            batch_format="pyarrow",
            zero_copy_batch=True,
            # Ray Data would start an actor again for ever on a row that kills it. Ray 2.60 warns that 2.64 takes them away.
            max_restarts=ACTOR_RESTARTS,
            max_task_retries=ACTOR_RESTARTS,
            label_selector=selector(),
        )
        yield from dataset.iter_batches(batch_format="pyarrow", batch_size=None)


class _Actor:
    """One process of the pool. Made at the first order, so that what fails then is told as any work's failure is."""

    def __init__(self, make: Callable[..., Work], shared: dict[str, Any]) -> None:
        self._make = functools.partial(make, **shared)
        self._work: Work | None = None

    def __call__(self, batch: pyarrow.Table) -> Iterator[pyarrow.Table]:
        yield from _telling(self._carry_out(batch.to_pylist()[0]))

    def _carry_out(self, order: Order) -> Iterator[pyarrow.Table]:
        self._work = self._work or self._make()
        yield from self._work(order)


def references(orders: Sequence[Order], work: Work, resources: Resources, **shared: Any) -> list[Any]:
    """The same, left where they were made: references (inline: the tables) for `call`."""
    if resources.inline():
        return list(results(orders, work, resources, **shared))
    with _settled(), _plain_errors():
        return list(_dataset(orders, work, resources.blocks, shared).to_arrow_refs())


def call(work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], resources: Resources) -> Iterator[Any]:
    """What `work(*arguments)` returns for each; a reference among the arguments arrives as its table. All run at once."""
    if resources.inline():
        yield from (work(*each) for each in arguments)
        return
    import ray

    task = ray.remote(work)
    with _plain_errors():
        yield from map(ray.get, [task.remote(*each) for each in arguments])


def ranges(total: int, parts: int) -> list[Order]:
    """0..total cut into at most `parts` ranges of nearly equal size: {"first": 0, "last": 17}, ..."""
    parts = max(min(parts, total), 1)
    edges = [total * part // parts for part in range(parts + 1)]
    return [{"first": first, "last": last} for first, last in pairwise(edges)]


def _dataset(orders: Sequence[Order], work: Work, blocks: int, shared: dict[str, Any]) -> "ray.data.Dataset":
    import ray.data

    from stages.storage.node import selector

    dataset = ray.data.from_items(list(orders), override_num_blocks=len(orders))
    return dataset.map_batches(
        _carry_out,
        compute=ray.data.TaskPoolStrategy(size=min(_handed_out(blocks), len(orders))),
        batch_size=1,
        batch_format="pyarrow",
        zero_copy_batch=True,
        fn_kwargs={"work": work, "shared": shared},
        label_selector=selector(),
    )


def _handed_out(blocks: int) -> int:
    """How many orders Ray holds at once. Where the node's CPUs alone bound what runs, each has one more waiting: Ray Data takes
    0.1 to 1.5 s to give out the next order, and Ray 0.03 s to begin one that waits."""
    from stages.storage import node

    cpus = int(sum(one["Resources"].get("CPU", 0) for one in node.facts()))
    return blocks if cpus > blocks else blocks + cpus


def _carry_out(batch: pyarrow.Table, work: Work, shared: dict[str, Any]) -> Iterator[pyarrow.Table]:
    yield from _telling(work(batch.to_pylist()[0], **shared))


def _telling(tables: Iterator[pyarrow.Table]) -> Iterator[pyarrow.Table]:
    try:
        yield from tables
    except (StageError, ArtifactError) as said:
        raise Told(said) from None


class Told(Exception):
    """Carries what a worker tells the user: to the message of an exception itself Ray Data adds advice of its own."""


@contextmanager
def _settled() -> Iterator[None]:
    """No bars and no start and end lines on the console; Ray Data's own log file keeps them. And no shares of memory for each
    operator: until they are known, for a second, Ray Data starts one task at a time, and our orders come back as small tables."""
    import ray.data

    context = ray.data.DataContext.get_current().copy()
    context.op_resource_reservation_enabled = False
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logger = logging.getLogger("ray.data")
    for handler in logger.handlers:
        if not isinstance(handler, logging.FileHandler):
            handler.setLevel(logging.CRITICAL)  # what fails is raised, so it need not be printed too
    with ray.data.DataContext.current(context):
        yield


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What a worker tells the user reaches the user as it was said, without Ray's frames around it."""
    import ray.exceptions

    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Told):
            raise error.cause.args[0] from None
        if isinstance(error.cause, StageError | ArtifactError):
            raise error.cause from None
        raise
