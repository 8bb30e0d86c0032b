"""One answer, token by token, and nothing beside it. Apart from the engine, because golden questions are asked like this, and
because the engine's answers are compared with these."""

from collections.abc import Iterator, Sequence

import torch
from transformers import DynamicCache

from stages.serving.model import LoadedModel
from stages.serving.sampling import Sampling, choose, make_generator


@torch.inference_mode()
def next_logits(loaded: LoadedModel, ids: Sequence[int], cache: DynamicCache) -> torch.Tensor:
    """Logits [vocab_size] for the token after `ids`; `cache` holds what came before and grows."""
    logits: torch.Tensor = loaded.forward([list(ids)], cache, keep=1)[0, -1]
    return logits.float()


def generate(loaded: LoadedModel, prompt: Sequence[int], sampling: Sampling, choice: int = 0) -> Iterator[int]:
    """Yield up to `max_tokens` ids; an id that ends the answer (end of sequence, `stop_ids`) is yielded last, once."""
    ends = sampling.stop_ids if sampling.ignore_eos else loaded.eos_ids | sampling.stop_ids
    generator = make_generator(sampling.seed, choice)
    cache = DynamicCache(config=loaded.model.config)
    made: list[int] = []
    step: Sequence[int] = prompt
    while len(made) < sampling.max_tokens:
        logits = next_logits(loaded, step, cache)
        banned = ends if len(made) < sampling.min_tokens else frozenset()
        token = choose(logits, prompt, made, banned, sampling, generator)
        yield token
        if token in ends:
            return
        made.append(token)
        step = [token]
