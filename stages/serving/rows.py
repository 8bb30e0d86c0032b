"""What the engine works on: requests, the prompts that are read, and answers while they grow. Apart from the engine's loop, which
decides whose turn it is, and from the cache that rows share."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache

from stages.serving.model import LoadedModel
from stages.serving.protocol import ApiError
from stages.serving.sampling import Sampling, choose, make_generator
from stages.serving.text_stream import TextStream


@dataclass(frozen=True)
class TokenLogprob:
    """One token and what the model itself (before temperature, bias and penalties) gave for it: natural logarithms."""

    token: int
    piece: bytes
    """Its bytes of the text, none of a special token; those of one character may be spread over several tokens."""
    logprob: float | None
    """None: the first token of a prompt, which nothing predicts."""
    top: tuple[tuple[int, bytes, float], ...]
    """(id, bytes, log-probability) of the likeliest, best first."""


@dataclass(frozen=True)
class Delta:
    """New text of one choice, and the tokens whose text is complete with it (when log-probabilities were asked for)."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Read:
    """A prompt was read: its tokens' log-probabilities, for each of the choices that follow it."""

    choices: Sequence[int]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class Done:
    """One choice is complete. `tokens` counts every sampled id, the one that ended the answer too."""

    choice: int
    finish_reason: str
    tokens: int


@dataclass(frozen=True)
class Ended:
    """The request is complete, or `error` says why not. Nothing follows."""

    error: ApiError | None = None


Event = Delta | Read | Done | Ended


@dataclass(frozen=True)
class Job:
    """A request for the model: prompts in token ids (none empty), `n` answers for each; choice = prompt * n + j."""

    prompts: Sequence[Sequence[int]]
    n: int
    sampling: Sampling
    emit: Callable[[Event], None]
    """Called from the model's thread; must not block."""
    deadline: float
    """`time.monotonic()` at which the answer is no longer wanted."""
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class Active:
    """A job that the engine has begun, and how many of its choices are still to end."""

    job: Job
    left: int
    over: bool = False


class Reading:
    """A prompt on its way through the model, a chunk at a time, in a cache of its own."""

    def __init__(self, loaded: LoadedModel, active: Active, number: int) -> None:
        job = active.job
        self.active, self.ids, self.loaded = active, job.prompts[number], loaded
        self.choices = deque(range(job.n))
        """Answers that have not begun."""
        self._first = number * job.n
        self._cache, self._read = loaded.new_cache(), 0
        self._told: list[TokenLogprob] = []
        self.logits: torch.Tensor | None = None
        """[vocab_size], of the token after what was read last."""

    @property
    def complete(self) -> bool:
        return self._read == len(self.ids)

    @property
    def reserved(self) -> int:
        """Tokens that one of its answers may come to hold."""
        return len(self.ids) + self.active.job.sampling.max_tokens

    def read(self, most: int) -> int:
        """Put up to `most` further tokens through the model; how many it were."""
        chunk = list(self.ids[self._read : self._read + most])
        sampling = self.active.job.sampling
        positions = torch.arange(self._read, self._read + len(chunk))[None]
        keep = 0 if sampling.echo_logprobs else 1
        logits = self.loaded.forward([chunk], self._cache, positions=positions, keep=keep)[0].float()
        if sampling.echo_logprobs:
            self._tell(chunk, logits, sampling.logprobs or 0)
        self.logits = logits[-1]
        self._read += len(chunk)
        if self.complete and sampling.echo_logprobs:
            self.active.job.emit(Read([self._first + j for j in range(self.active.job.n)], tuple(self._told)))
        return len(chunk)

    def next_row(self) -> "tuple[Row, DynamicCache]":
        """An answer that begins, and the cache it goes on from."""
        j = self.choices.popleft()
        return Row(self.loaded, self.active, self.ids, self._first + j, j), self._cache

    def pass_over(self) -> None:
        """No answer was asked for."""
        for j in self.choices:
            self.active.job.emit(Done(self._first + j, "length", 0))

    def _tell(self, chunk: list[int], logits: torch.Tensor, top: int) -> None:
        if self.logits is None:
            self._told.append(TokenLogprob(chunk[0], self.loaded.piece(chunk[0]), None, ()))
            before, tokens = logits[:-1], chunk[1:]
        else:
            before, tokens = torch.cat([self.logits[None], logits[:-1]]), chunk
        for row, token in zip(before.log_softmax(-1), tokens, strict=True):
            self._told.append(told(self.loaded, row, token, top))


class Row:
    """One answer while it grows."""

    def __init__(self, loaded: LoadedModel, active: Active, prompt: Sequence[int], choice: int, j: int) -> None:
        self.active, self.prompt, self.choice = active, prompt, choice
        self.sampling = active.job.sampling
        self.made: list[int] = []
        self._loaded = loaded
        self._ends = self.sampling.stop_ids if self.sampling.ignore_eos else loaded.eos_ids | self.sampling.stop_ids
        self._generator = make_generator(self.sampling.seed, j)
        self._text = TextStream(loaded.backend, prompt, self.sampling.stop)
        self._held: deque[tuple[int, TokenLogprob]] = deque()
        """(where its bytes end in the text, token) of tokens whose text is not out."""
        self._bytes_made = self._bytes_out = 0

    @property
    def position(self) -> int:
        """Of the newest token, which the model has not seen yet."""
        return len(self.prompt) + len(self.made) - 1

    @property
    def reserved(self) -> int:
        return len(self.prompt) + self.sampling.max_tokens

    def take(self, logits: torch.Tensor, likeliest: int | None = None) -> bool:
        """Choose the next token from logits [vocab_size], send what text it made certain; whether the answer is complete.
        `likeliest`: the best token, where that was found for all rows at once."""
        banned = self._ends if len(self.made) < self.sampling.min_tokens else frozenset()
        scores = logits.log_softmax(-1) if self.sampling.logprobs is not None else None
        if likeliest is not None and self.sampling.plain and likeliest not in banned:
            token = likeliest
        else:
            token = choose(logits, self.prompt, self.made, banned, self.sampling, self._generator)
        self.made.append(token)
        if token in self._ends:
            return self._finish("stop")
        if scores is not None:
            entry = told(self._loaded, scores, token, self.sampling.logprobs or 0)
            self._bytes_made += len(entry.piece)
            self._held.append((self._bytes_made, entry))
        self._send(self._text.push(token))
        if self._text.stopped:
            return self._finish("stop")
        if len(self.made) >= self.sampling.max_tokens:
            return self._finish("length")
        return False

    def _finish(self, reason: str) -> bool:
        self._send(self._text.flush(), last=True)
        self.active.job.emit(Done(self.choice, reason, len(self.made)))
        return True

    def _send(self, text: str, last: bool = False) -> None:
        self._bytes_out += len(text.encode())
        out: list[TokenLogprob] = []
        while self._held:
            ends, entry = self._held[0]
            begun = ends - len(entry.piece) < self._bytes_out
            if not (ends <= self._bytes_out or (last and (begun or not self._text.stopped))):
                break
            out.append(self._held.popleft()[1])
        if text or out:
            self.active.job.emit(Delta(self.choice, text, tuple(out)))


def told(loaded: LoadedModel, scores: torch.Tensor, token: int, top: int) -> TokenLogprob:
    """From log-probabilities [vocab_size]."""
    values, ids = scores.topk(min(top, len(scores)))
    best = tuple((i, loaded.piece(i), v) for i, v in zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, loaded.piece(token), float(scores[token]), best)
