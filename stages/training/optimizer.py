"""What takes a step, and how long it is: the optimizers, the learning rate of each step, the norm of the gradient. Apart,
because their values at the first, peak and last step are tested as plain numbers."""

import math
from typing import Any

import torch

from stages.training.config import Algorithm, Optimizer, Schedule, Shape


def learning_rate(step: int, steps: int, peak: float, schedule: Schedule) -> float:
    """Learning rate of optimizer step `step` (from 0) of `steps`: a linear rise that reaches `peak` at the last warm-up step,
    then the shape, which reaches `peak * minimum_ratio` at the last step."""
    warmup = warmup_steps(steps, schedule)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.shape is Shape.constant:
        return peak
    top = max(warmup - 1, 0)  # the last step that has the peak
    if schedule.shape is Shape.wsd:
        top = max(top, steps - 1 - round(schedule.decay_ratio * steps))
    progress = max(0.0, (step - top) / max(steps - 1 - top, 1))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.shape is Shape.cosine else 1 - progress
    return peak * (schedule.minimum_ratio + (1 - schedule.minimum_ratio) * left)


def warmup_steps(steps: int, schedule: Schedule) -> int:
    """Optimizer steps of the linear rise."""
    return round(schedule.warmup_ratio * steps)


def made(model: torch.nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Decay on matrices alone: norms and biases set scales, and embedding rows of rare tokens would only shrink."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2 and id(p) not in embeddings]
    kept = [p for p in trained if p.ndim < 2 or id(p) in embeddings]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]  # an adapter has matrices alone
    if settings.name is Algorithm.adafactor:
        return torch.optim.Adafactor(groups, lr=0.0)
    return torch.optim.AdamW(groups, lr=0.0, betas=(settings.beta1, settings.beta2), fused=True)


def clip(model: torch.nn.Module, limit: float) -> float:
    """Scale the gradients of all parameters to a global L2 norm of at most `limit`; the norm before."""
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    # The norm of sharded gradients is itself sharded, and each rank's part of it is no norm.
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def take(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """One optimizer step at this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
