"""Continues a prompt, one token at a time, with nothing but a model and a generator of its own. Apart, because golden
answers and evaluation samples must not depend on a model's generation defaults or on anybody else's random state."""

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
import transformers


@torch.no_grad()
def generate(
    model: Any,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    stop: Collection[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """The ids that follow `prompt`: greedy at temperature 0, else sampled from a generator seeded with `seed`. Ends after
    an id in `stop` (which is included), `max_new_tokens`, or the longest sequence that the model takes."""
    generator = torch.Generator().manual_seed(seed)
    cache = transformers.DynamicCache(config=model.config)
    longest = getattr(model.config, "max_position_embeddings", len(prompt) + max_new_tokens)
    takes_positions = "position_ids" in inspect.signature(adapted(model).forward).parameters
    made: list[int] = []
    new, before = list(prompt), 0
    while len(made) < max_new_tokens and len(prompt) + len(made) < longest:
        # Said, not left to the model: some count the positions of every call from nought.
        said = {"position_ids": torch.arange(before, before + len(new))[None]} if takes_positions else {}
        logits = model(input_ids=torch.tensor([new]), cache=cache, use_cache=True, **said).logits[0, -1].float()
        before += len(new)
        if temperature > 0:
            chosen = int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
        else:
            chosen = int(logits.argmax())
        made.append(chosen)
        new = [chosen]
        if chosen in stop:
            break
    return made


def adapted(model: Any) -> Any:
    """The model itself where an adapter is wrapped around it, whose own signature says nothing."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@torch.no_grad()
def top_logprobs(model: Any, prompt: Sequence[int], count: int) -> list[tuple[int, float]]:
    """The `count` likeliest next ids with their natural log-probabilities, likeliest first."""
    logits = model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0, -1].float()
    values, ids = torch.log_softmax(logits, dim=-1).topk(min(count, len(logits)))
    return list(zip(ids.tolist(), values.tolist(), strict=True))
