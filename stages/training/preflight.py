"""Compares what a stage asks of a cluster with what the cluster has, before anything is asked. Apart, because Ray itself
would go on asking for ever for what can never be given."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stages.contract import ResourcesUnavailable

SETTLE_S = 10.0
"""What an earlier stage has just given back takes a moment to be counted."""


def require(
    kind: str,
    *,
    workers: int,
    each: float,
    nodes: Sequence[Mapping[str, Any]],
    free: Callable[[], Mapping[str, float]],
    fields: tuple[str, str],
) -> None:
    """ResourcesUnavailable, within seconds and naming the field to lower, unless `workers` times `each` of a `kind` ("CPU",
    "GPU") can be placed.

    `nodes` as `ray.nodes()` gives them; `free` as `ray.available_resources`; `fields` are the config keys of workers and each.
    """
    sizes = [float(node["Resources"].get(kind, 0.0)) for node in nodes if node["Alive"]]
    cluster, largest, wanted = sum(sizes), max(sizes, default=0.0), workers * each
    if each > largest:
        where = "cluster" if len(sizes) == 1 else "its largest node"
        raise ResourcesUnavailable(f"needs {each:g} {kind}, {where} has {largest:g}: set {fields[1]} <= {largest:g}")
    if wanted > cluster:
        fitting = int(sum(size // each for size in sizes))
        raise ResourcesUnavailable(f"needs {wanted:g} {kind}, cluster has {cluster:g}: set {fields[0]} <= {fitting}")
    deadline = time.monotonic() + SETTLE_S
    while (unused := free().get(kind, 0.0)) < wanted:
        if time.monotonic() > deadline:
            fitting = int(unused // each)
            way = f"{fields[0]} <= {fitting}" if fitting else f"{fields[1]} <= {unused:g}"
            raise ResourcesUnavailable(
                f"needs {wanted:g} {kind}, cluster has {cluster:g} of which {unused:g} are free: stop what holds the "
                f"others, or set {way}"
            )
        time.sleep(0.2)
