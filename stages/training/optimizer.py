"""AdamW and its schedule. Apart, because their values at the first, peak and last step are tested as plain numbers."""

import math

import torch


def learning_rate(step: int, steps: int, peak: float, minimum_ratio: float, warmup_ratio: float) -> float:
    """Learning rate of optimizer step `step` (from 0): a linear rise that reaches `peak` at the last warm-up step, then
    a cosine that reaches `peak * minimum_ratio` at the last step."""
    warmup = round(warmup_ratio * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    top = max(warmup - 1, 0)
    progress = (step - top) / max(steps - 1 - top, 1)
    return peak * (minimum_ratio + (1 - minimum_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def adamw(model: torch.nn.Module, weight_decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    """Decay on matrices alone: norms and biases set scales, and embedding rows of rare tokens would only shrink."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2 and id(p) not in embeddings]
    kept = [p for p in trained if p.ndim < 2 or id(p) in embeddings]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)
