"""One answer, token by token. Apart from thread and queue, so that it can be compared with `model.generate`."""

import hashlib
import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from stages.serving.model import LoadedModel
from stages.serving.protocol import ApiError

log = logging.getLogger(__name__)

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by less overflows float32."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen and when an answer ends. Values are checked before they come here."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    """Special tokens that were named as stop strings: their text never appears, so the id must end the answer."""


def make_generator(seed: int | None, choice: int) -> torch.Generator:
    """A random stream of its own for each choice, so that one request's seed never touches another's answer."""
    if seed is None:
        number = secrets.randbits(63)
    elif choice == 0:
        number = seed
    else:
        number = int.from_bytes(hashlib.sha256(f"{seed}/{choice}".encode()).digest()[:7], "big")
    return torch.Generator().manual_seed(number)


@torch.inference_mode()
def next_logits(loaded: LoadedModel, ids: Sequence[int], cache: DynamicCache) -> torch.Tensor:
    """Logits [vocab_size] for the token after `ids`; `cache` holds what came before and grows."""
    step = torch.tensor([list(ids)], dtype=torch.long)
    logits: torch.Tensor = loaded.model(input_ids=step, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
    return logits.float()


def generate(loaded: LoadedModel, prompt: Sequence[int], sampling: Sampling, choice: int = 0) -> Iterator[int]:
    """Yield up to `max_tokens` ids; an id that ends the answer (end of sequence, `stop_ids`) is yielded last, once."""
    ends = sampling.stop_ids if sampling.ignore_eos else loaded.eos_ids | sampling.stop_ids
    generator = make_generator(sampling.seed, choice)
    cache = DynamicCache(config=loaded.model.config)
    seen = list(prompt)
    step: Sequence[int] = prompt
    for count in range(sampling.max_tokens):
        logits = next_logits(loaded, step, cache)
        try:
            token = choose(logits, seen, ends if count < sampling.min_tokens else frozenset(), sampling, generator)
        except Exception as error:  # one request's numbers must not end the model for all
            log.exception("the next token could not be chosen")
            raise ApiError(500, "the next token could not be chosen", kind="server_error") from error
        yield token
        if token in ends:
            return
        seen.append(token)
        step = [token]


@torch.inference_mode()
def choose(
    logits: torch.Tensor,
    seen: Sequence[int],
    banned: frozenset[int],
    sampling: Sampling,
    generator: torch.Generator,
) -> int:
    """The next id from logits [vocab_size]: bans, penalty, then greedy or one draw within top_k, top_p, min_p."""
    if banned:
        logits[sorted(banned)] = -torch.inf
    if sampling.repetition_penalty != 1.0:
        ids = torch.tensor(sorted(set(seen)))
        known = logits[ids]
        logits[ids] = torch.where(known > 0, known / sampling.repetition_penalty, known * sampling.repetition_penalty)
    if sampling.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    probabilities, order = torch.sort(
        torch.softmax(logits / sampling.temperature, dim=-1), descending=True, stable=True
    )
    keep = probabilities >= sampling.min_p * probabilities[0]
    keep &= probabilities.cumsum(-1) - probabilities < sampling.top_p  # the token that crosses top_p stays
    if sampling.top_k > 0:
        keep[sampling.top_k :] = False
    keep[0] = True
    drawn = torch.multinomial(probabilities * keep, 1, generator=generator)
    return int(order[drawn])
