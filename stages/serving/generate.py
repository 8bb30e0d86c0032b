"""One answer, token by token, and nothing beside it. Apart from the engine, because golden questions are asked like this, and
because the engine's answers are compared with these."""

from collections.abc import Iterator, Sequence

import torch
from transformers import DynamicCache

from stages.serving.model import LoadedModel
from stages.serving.sampling import Sampling, choose, make_generator


@torch.inference_mode()
def next_logits(loaded: LoadedModel, ids: Sequence[int], cache: DynamicCache, before: int = 0) -> torch.Tensor:
    """Logits [vocab_size] for the token after `ids`; `cache` holds the `before` tokens that came before, and grows."""
    positions = torch.arange(before, before + len(ids))[None]
    return loaded.forward([list(ids)], cache, positions=positions)[0, -1].float()


def generate(loaded: LoadedModel, prompt: Sequence[int], sampling: Sampling, choice: int = 0) -> Iterator[int]:
    """Yield up to `max_tokens` ids; an id that ends the answer (end of sequence, `stop_ids`) is yielded last, once."""
    ends = sampling.stop_ids if sampling.ignore_eos else loaded.eos_ids | sampling.stop_ids
    generator = make_generator(sampling.seed, choice)
    cache = loaded.new_cache()
    made: list[int] = []
    before, step = 0, list(prompt)
    while len(made) < sampling.max_tokens:
        logits = next_logits(loaded, step, cache, before)
        banned = ends if len(made) < sampling.min_tokens else frozenset()
        token = choose(logits, prompt, made, banned, sampling, generator)
        yield token
        if token in ends:
            return
        made.append(token)
        before, step = before + len(step), [token]
