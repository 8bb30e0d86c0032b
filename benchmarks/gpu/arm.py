"""One arm of the GPU bench as a process: `python -m benchmarks.gpu.arm NAME DATA WORK SIZES` prints its findings as one line of JSON."""

import json
import sys
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from benchmarks import workload
from stages.training.config import Job, ModelConfig, Precision

LARGE = ModelConfig(
    hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4
)
"""About 90 M parameters with the workload's vocabulary: large enough to fill a card, small enough for a minute."""


class Sizes(Enum):
    """(steps of the small model, steps of the large one, rows in a step of the large one, rows in a forward pass)"""

    full = (24, 60, 256, 128)
    quick = (6, 3, 4, 2)


@dataclass(frozen=True)
class Arm:
    """What differs from the small model in float32."""

    large: bool = False
    on_processor: bool = False
    cut: bool = False
    changes: dict[str, Any] = field(default_factory=dict)


BFLOAT16 = {"precision": Precision.bfloat16}
ARMS = {
    "processor": Arm(on_processor=True),
    "float32": Arm(),
    "cut": Arm(cut=True),
    "large_float32": Arm(large=True),
    "large": Arm(large=True, changes=BFLOAT16),
    "checkpointed": Arm(large=True, changes={**BFLOAT16, "gradient_checkpointing": True}),
}


def job(name: str, data: Path, work: Path, sizes: Sizes) -> Job:
    """What the loop is asked to do in this arm."""
    arm, (few, many, rows, at_once) = ARMS[name], sizes.value
    given = workload.job(data, work, many if arm.large else few)
    given = replace(given, threads=4 if arm.on_processor else given.threads)
    if arm.large:
        recipe = replace(given.recipe, tokens_per_step=rows * workload.LENGTH, learning_rate=1e-3)
        model = LARGE if sizes is Sizes.full else given.model
        given = replace(given, recipe=recipe, model=model, micro_batch_rows=at_once)
    of_recipe = {name: value for name, value in arm.changes.items() if hasattr(given.recipe, name)}
    of_job = {name: value for name, value in arm.changes.items() if name not in of_recipe}
    return replace(given, recipe=replace(given.recipe, **of_recipe), **of_job)


def measure(name: str, data: Path, work: Path, sizes: Sizes) -> dict[str, Any]:
    """Losses of each step, what the loop measured, and whether the export is what was trained."""
    from stages.training.follow import METRICS
    from stages.training.loop import Training, run
    from stages.training.reloaded import require_equal
    from stages.training.world import joined, repeatable

    given = job(name, data, work, sizes)
    if ARMS[name].cut:
        given = replace(given, checkpoint_every=2)
        with joined(60) as world, repeatable(given.threads):
            training = Training(given, world, lambda: None)
            for step in range(training.resume(), training.sampler.steps // 2 + 1):
                training.step(step)
    run(given)
    require_equal(work / "export", work / "expected")
    lines = [json.loads(line) for line in (work / METRICS).read_text("utf-8").splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    summary = next(line["summary"] for line in reversed(lines) if "summary" in line)
    return {**summary, "losses": [losses[step] for step in sorted(losses)], "reloaded": True}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), Sizes[sys.argv[4]])))
