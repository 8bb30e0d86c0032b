"""Compares what a stage asks of a cluster with what the cluster has, before anything is asked. Apart, because Ray itself
would go on asking for ever for what can never be given."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stages.contract import ResourcesUnavailable

SETTLE_S = 10.0
"""What an earlier stage has just given back takes a moment to be counted."""


def require_cpus(
    *, workers: int, cpus: float, nodes: Sequence[Mapping[str, Any]], free: Callable[[], float], fields: tuple[str, str]
) -> None:
    """ResourcesUnavailable, within seconds and naming the field to lower, unless `workers` times `cpus` can be placed.

    `nodes` as `ray.nodes()` gives them; `free` counts what is unused now; `fields` are the config keys of workers and cpus.
    """
    sizes = [float(node["Resources"].get("CPU", 0.0)) for node in nodes if node["Alive"]]
    cluster, largest, wanted = sum(sizes), max(sizes, default=0.0), workers * cpus
    if cpus > largest:
        where = "cluster" if len(sizes) == 1 else "its largest node"
        raise ResourcesUnavailable(f"needs {cpus:g} CPU, {where} has {largest:g}: set {fields[1]} <= {largest:g}")
    if wanted > cluster:
        fitting = int(sum(size // cpus for size in sizes))
        raise ResourcesUnavailable(f"needs {wanted:g} CPU, cluster has {cluster:g}: set {fields[0]} <= {fitting}")
    deadline = time.monotonic() + SETTLE_S
    while (unused := free()) < wanted:
        if time.monotonic() > deadline:
            raise ResourcesUnavailable(
                f"needs {wanted:g} CPU, cluster has {cluster:g} of which {unused:g} are free: stop what holds the others, "
                f"or set {fields[0]} <= {int(unused // cpus)}"
            )
        time.sleep(0.2)
