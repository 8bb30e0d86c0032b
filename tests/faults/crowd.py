"""A stage on Ray that takes CPUs in a placement group and holds them: what others then cannot have."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.artifacts import EvalReport
from stages.contract import Context, StageConfig, StageResources, stage
from tests.faults import inject

PIPELINE = """# @package _global_
defaults: [/crowd: schema, _self_]
name: crowd
"""


@dataclass(kw_only=True)
class CrowdResources(StageResources):
    workers: int = 1
    until: str = ""
    """A path: CPUs are held until it exists."""


@dataclass(kw_only=True)
class CrowdConfig(StageConfig):
    value: int = 1
    resources: CrowdResources = field(default_factory=CrowdResources)


@stage(ray=True)
def crowd(cfg: CrowdConfig, ctx: Context) -> EvalReport:
    import ray
    from ray.util import placement_group, remove_placement_group

    from stages.storage.node import facts
    from stages.training.preflight import require

    inject.begin("crowd", ctx.state)
    require(
        "CPU",
        workers=cfg.resources.workers,
        each=1.0,
        nodes=facts(),
        free=ray.available_resources,
        fields=("stages.crowd.resources.workers", "stages.crowd.resources.cpus"),
    )
    group: Any = placement_group([{"CPU": 1.0}] * cfg.resources.workers)
    try:
        ray.get(group.ready())
        inject.note(ctx.state, f"crowd on {ray.get_runtime_context().gcs_address}")
        deadline = time.monotonic() + 120
        while cfg.resources.until and not Path(cfg.resources.until).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        remove_placement_group(group)
    return EvalReport.write(ctx.output, {"metrics": {"value": cfg.value}})
