"""Many rows through a model at once: answers to prompts, and log-probabilities of texts. Apart from the engine, because here
nobody waits for a first token and throughput is all.

Rows that share a forward pass change each other's last digits (1e-7 on the logits), so callers cut batches from the data alone,
never from how many workers there are: then equal rows get equal answers wherever they are computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from stages.serving.model import LoadedModel
from stages.serving.sampling import Sampling, choose, make_generator
from stages.serving.text_stream import TextStream

TOKENS_PER_FORWARD = 4_096
"""Places of one forward pass whose logits are wanted: 2.5 GB at a vocabulary of 150,000."""


@dataclass(frozen=True)
class Answer:
    """What followed one prompt."""

    text: str
    tokens: int
    """Ids sampled, the one that ended the answer among them."""
    finished: bool
    """By itself (end of sequence or a stop string), not by `max_tokens`."""


class _Row:
    """One prompt's answer while it grows."""

    def __init__(self, loaded: LoadedModel, prompt: Sequence[int], seed: int, sampling: Sampling) -> None:
        self._sampling, self._generator = sampling, make_generator(seed, 0)
        self._prompt, self._made = prompt, list[int]()
        self._ends = loaded.eos_ids | sampling.stop_ids
        self._stream = TextStream(loaded.backend, prompt, sampling.stop)
        self._pieces: list[str] = []
        self.finished = False

    def take(self, logits: torch.Tensor) -> int:
        """Choose the next id from logits [vocab_size]."""
        token = choose(logits, self._prompt, self._made, frozenset(), self._sampling, self._generator)
        self._made.append(token)
        if token in self._ends:
            self.finished = True
        else:
            self._pieces.append(self._stream.push(token))
            self.finished = self._stream.stopped
        return token

    def answer(self) -> Answer:
        return Answer("".join(self._pieces) + self._stream.flush(), len(self._made), self.finished)


@torch.inference_mode()
def answers(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
) -> list[Answer]:
    """What follows each prompt (token ids, none empty), all decoded together: padded left, each row with positions and a
    random stream of its own; a row that has ended leaves the batch."""
    width = max(map(len, prompts))
    step = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(step)
    for index, prompt in enumerate(prompts):
        step[index, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[index, width - len(prompt) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    rows = [_Row(loaded, prompt, seed, sampling) for prompt, seed in zip(prompts, seeds, strict=True)]
    live, cache = list(rows), DynamicCache(config=loaded.model.config)
    for _ in range(sampling.max_tokens):
        output = loaded.model(
            input_ids=step, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1
        )
        logits = output.logits[:, -1].float()
        tokens = torch.tensor([row.take(logits[index]) for index, row in enumerate(live)])
        staying = [index for index, row in enumerate(live) if not row.finished]
        if not staying:
            break
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones((len(live), 1), dtype=torch.long)], dim=1)
        if len(staying) < len(live):
            kept = torch.tensor(staying)
            live, tokens, positions, mask = (
                [live[index] for index in staying],
                tokens[kept],
                positions[kept],
                mask[kept],
            )
            cache.reorder_cache(kept)
        step = tokens[:, None]
    return [row.answer() for row in rows]


@torch.inference_mode()
def log_probabilities(
    loaded: LoadedModel, rows: Sequence[Sequence[int]], counted: Sequence[Sequence[bool]]
) -> list[float]:
    """For each row of ids the summed natural log-probability of those that are `counted`, each given all before it. The first
    id of a row is predicted by nothing and never counts. Padded right, which causal attention does not see."""
    width = max(map(len, rows))
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    wanted = torch.zeros((len(rows), width), dtype=torch.bool)
    for index, (row, marks) in enumerate(zip(rows, counted, strict=True)):
        ids[index, : len(row)] = torch.tensor(list(row))
        wanted[index, : len(row)] = torch.tensor(list(marks), dtype=torch.bool)
    wanted[:, 0] = False
    if not wanted.any():
        return [0.0] * len(rows)
    first = int(wanted.any(0).nonzero()[0])
    keep = width - first + 1  # the place before the first counted id predicts it
    logits = loaded.model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits
    sums = []
    for row, marks, scores in zip(ids, wanted, logits, strict=True):
        places = marks.nonzero()[:, 0]
        predicted = scores[places - first].double()
        chosen = predicted.gather(1, row[places][:, None])[:, 0] - predicted.logsumexp(1)
        sums.append(float(chosen.sum()))
    return sums


def batches(lengths: Sequence[int], rows: int, places: int | None = None) -> Iterator[list[int]]:
    """Indices cut into batches of neighbours in length: at most `rows`, and as many as fit into `places` when padded (one
    always fits). Long ones first, so that what does not fit into memory shows at once."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if batch and (len(batch) == rows or (places and lengths[batch[0]] * (len(batch) + 1) > places)):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
