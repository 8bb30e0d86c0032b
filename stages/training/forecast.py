"""The estimate of a run that is about to start, from the model and data that it has in its hands, and what the run says to it
afterwards. Apart from the arithmetic, which a plan does without any of them."""

import os
from typing import Any

from stages.training import adapters, estimate
from stages.training.config import Algorithm, Job, Precision
from stages.training.device import peak_flops
from stages.training.estimate import Estimate, ModelShape
from stages.training.memory import free_memory, resident
from stages.training.objective import Objective
from stages.training.pair_recipe import ReferenceFrom
from stages.training.world import World


class Forecast:
    """What is expected of one run. Nothing is expected of an architecture in other names than Llama's."""

    def __init__(self, job: Job, objective: Objective, world: World) -> None:
        self.job, self.world = job, world
        config = objective.model.config.to_dict()
        self.length = int(objective.summary()["sequence_length"])
        self.shape = ModelShape.of(config)
        self.peak = peak_flops(job.peak_tflops, world.device, job.recipe.precision)
        self.trained = adapters.trained(objective.model)
        self.sequences = len(objective.weightless()["input_ids"])  # 2 of a pair
        self.rows, self.steps = objective.sampler.total_rows, objective.sampler.steps
        self.positions = int(self.rows * self.sequences * objective.lengths.mean())  # padding is nearly all left away
        self.step_rows = -(-objective.sampler.rows_per_step // world.size) * self.sequences
        self.validation_rows = -(-len(objective.validation) // world.size) * self.sequences
        self.data = objective.sampler.rows * self.sequences * self.length
        self.reference = objective.reference
        self.estimate = self._estimate() if self.shape else None

    def _estimate(self) -> Estimate:
        assert self.shape is not None
        recipe = self.job.recipe
        rate = estimate.GPU_SHARE * self.peak if self.peak else estimate.CPU_FLOPS * self.job.threads
        known = self.peak is not None or self.world.device.type == "cpu"  # no time is told of a GPU of unknown speed
        return estimate.training(
            self.shape,
            length=self.length,
            micro_batch_rows=self.job.micro_batch_rows * self.sequences,
            positions=self.positions if known else 0,
            data_tokens=self.data,
            step_rows=self.step_rows,
            validation_rows=self.validation_rows,
            workers=self.world.size,
            sharded=self.job.sharded,
            trained=self.trained,
            lean_optimizer=recipe.optimizer.name is Algorithm.adafactor,
            bfloat16=recipe.precision is Precision.bfloat16,
            gradient_checkpointing=self.job.gradient_checkpointing,
            reference_pass=self.reference in (ReferenceFrom.adapter_off, ReferenceFrom.copy),
            frozen_copy=self.reference is ReferenceFrom.copy,
            flops_per_second=rate,
        )

    def require_room(self) -> None:
        """ResourcesUnavailable when this machine cannot hold the workers that it is to hold."""
        free = free_memory()
        if self.estimate is None or free is None or self.world.device.type == "cuda":
            return
        here = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world.size)))
        estimate.require_room(self.estimate, free + here * resident(), here)

    def text(self) -> str:
        """What is expected, for people."""
        return "not estimated: an unknown architecture" if self.estimate is None else self.estimate.text()

    def against(self, facts: dict[str, float]) -> dict[str, Any]:
        """What came of it: MFU with its formula and peak, and what was expected beside what was found."""
        if self.estimate is None or self.shape is None or not facts:
            return {}
        flops = estimate.flops_per_token(self.shape, self.length, min(1.0, self.trained / self.shape.parameters))
        speed = facts["tokens_per_second_padded"] / self.world.size
        found: dict[str, Any] = {
            "flops_per_token": flops,
            "flops_per_second": speed * flops,
            "estimated_memory_bytes": float(self.estimate.memory),
        }
        if self.estimate.seconds:
            found["estimated_seconds"] = self.estimate.seconds * facts["timed_steps"] / self.steps
        if self.peak:
            found |= {"mfu": estimate.utilisation(speed, flops, self.peak), "peak_flops": self.peak}
        return found
