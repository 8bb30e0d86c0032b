"""Why nothing moves on a Ray cluster: what is asked for against what there is. Apart, because it asks Ray's control service by
an interface of its own, without a dashboard.
"""

from collections import Counter, defaultdict


def demand_against_supply(address: str) -> str:
    """In words, what is asked of the cluster and not placed yet, and what there is. From Ray's own control service, without its
    dashboard; for a process that has joined."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.autoscaler.v2.sdk import get_cluster_resource_state

    state = get_cluster_resource_state(GcsClient(address))
    wanted: Counter[str] = Counter()
    asked = [(r.request.resources_bundle, r.count) for r in state.pending_resource_requests]
    asked += [(r.resources_bundle, 1) for gang in state.pending_gang_resource_requests for r in gang.requests]
    for bundle, count in asked:
        wanted[", ".join(f"{value:g} {name}" for name, value in sorted(bundle.items())) or "no resources"] += count
    total: dict[str, float] = defaultdict(float)
    free: dict[str, float] = defaultdict(float)
    for node in state.node_states:
        for kind, amount in node.total_resources.items():
            total[kind] += amount
        for kind, amount in node.available_resources.items():
            free[kind] += amount
    kinds = sorted(kind for kind in total if kind in ("CPU", "GPU"))
    supply = ", ".join(f"{total[kind]:g} {kind} ({free[kind]:g} free)" for kind in kinds) or "no CPU"
    if not wanted:
        return f"nothing waits to be placed; the cluster has {supply}"
    demand = " and ".join(f"{count} x {{{bundle}}}" for bundle, count in sorted(wanted.items()))
    return f"waits for {demand}; the cluster has {supply}"
