"""Where a stage's own tasks run: on its node. Apart, because every stage that hands a directory to a task needs it.

A stage and its tasks share `ctx.output` and `ctx.work`, which are directories of one node. On one machine that is no restriction; on a
cluster each stage picks a node with room, and independent stages may be on different ones.
"""

from typing import Any


def here() -> Any:
    """A scheduling strategy for `ray.remote(scheduling_strategy=...)`: this node or none."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def facts() -> list[dict[str, Any]]:
    """This node as `ray.nodes()` describes it: what a stage's tasks can have."""
    import ray

    return [node for node in ray.nodes() if node["NodeID"] == ray.get_runtime_context().get_node_id()]


def selector() -> dict[str, str]:
    """The same as labels, for what takes no strategy (Ray Train's workers)."""
    import ray

    return {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
