"""How the next token is chosen from a model's logits. Apart from the loops that ask for it, so that one answer, a batch and the
engine choose alike, and every rule is tested on bare numbers.

Order, as OpenAI's: bias, presence and frequency penalties, repetition penalty, bans; then greedy, or one draw within top_k, top_p
and min_p at the temperature.
"""

import hashlib
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by less overflows float32."""

LARGEST = 1e30
"""A repetition penalty of 1e-300 makes infinities of logits: beyond this they are as good, and can be divided by any temperature."""


class NoNumbers(ArithmeticError):
    """The model's logits are not finite: no token can be chosen."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen and when an answer ends. Values are checked before they come here."""

    max_tokens: int
    """0: the prompt is only read (for its log-probabilities)."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """Taken from the logit of each token that the answer holds already."""
    frequency_penalty: float = 0.0
    """Taken from it as many times as the answer holds the token."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in prompt or answer are divided by it, negative ones multiplied."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> added to its logit; 100 forces a token, -100 bans it."""
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    """Special tokens that were named as stop strings: their text never appears, so the id must end the answer."""
    logprobs: int | None = None
    """So many of the likeliest tokens are told with each token; None: nothing is told."""
    echo_logprobs: bool = False
    """The same for each token of the prompt."""

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def plain(self) -> bool:
        """The likeliest token of the model as it is: nothing is added to the logits, nothing is drawn."""
        return (
            self.greedy
            and self.repetition_penalty == 1.0
            and not (self.presence_penalty or self.frequency_penalty or self.logit_bias)
        )


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
def choose(
    logits: torch.Tensor,
    prompt: Sequence[int],
    made: Sequence[int],
    banned: Collection[int],
    sampling: Sampling,
    generator: torch.Generator,
) -> int:
    """The next id from logits [vocab_size] (float32, changed in place) after `prompt` and what was `made` of the answer. NoNumbers
    when the logits are not numbers."""
    if not bool(torch.isfinite(logits.max())):
        raise NoNumbers("the model's logits are not finite")
    _adjust(logits, prompt, made, sampling)
    logits.clamp_(-LARGEST, LARGEST)
    if banned:
        logits[sorted(banned)] = -torch.inf
    if sampling.greedy:
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


def _adjust(logits: torch.Tensor, prompt: Sequence[int], made: Sequence[int], sampling: Sampling) -> None:
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias))
        logits[ids] += torch.tensor(list(sampling.logit_bias.values()))
    if made and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(made)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype)
        logits[torch.tensor(list(counts))] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if sampling.repetition_penalty != 1.0:
        ids = torch.tensor(sorted({*prompt, *made}))
        known = logits[ids]
        logits[ids] = torch.where(known > 0, known / sampling.repetition_penalty, known * sampling.repetition_penalty)
