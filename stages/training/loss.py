"""From packed rows to one number: summed cross entropy over supervised tokens. Apart, because training, validation and
evaluation must take the very same loss."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stages.text.packed import PackedSplit

IGNORED = -100

Batch = dict[str, torch.Tensor]


def batch(split: PackedSplit, rows: npt.NDArray[np.int64]) -> Batch:
    """`input_ids`, `position_ids` and next-token `labels` of these rows, all int64 [rows, the longest of them]."""
    ids, own, places = split.trimmed(rows)
    labels = np.full(own.shape, IGNORED, dtype=np.int64)
    labels[:, :-1] = own[:, 1:]
    return {
        "input_ids": torch.from_numpy(ids.astype(np.int64)),
        "position_ids": torch.from_numpy(places.astype(np.int64)),
        "labels": torch.from_numpy(labels),
    }


def longest_first(rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """These rows with neighbours in length side by side: a batch of them is padded little, and what needs most memory comes
    first. Rows of one length stay in their order."""
    return rows[np.argsort(-lengths[rows], kind="stable")]


def on(device: torch.device, given: Batch) -> Batch:
    """The batch on the device that computes."""
    return {name: tensor.to(device) for name, tensor in given.items()}


def weightless(split: PackedSplit) -> Batch:
    """A row without supervised tokens, for a worker that has no row of its own in a step: it adds exactly zero."""
    row = batch(split, np.zeros(1, dtype=np.int64))
    row["labels"].fill_(IGNORED)
    return row


def supervised_tokens(split: PackedSplit) -> npt.NDArray[np.int64]:
    """[rows] how many tokens of each row are predicted (the first position of a row never is)."""
    return (split.labels[:, 1:] != IGNORED).sum(axis=1)


class SummedLoss(torch.nn.Module):
    """A model whose output is the summed cross entropy in nats: never a mean, because only the caller knows how many
    tokens the whole step has over all workers and accumulated batches."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # Positions that restart, no mask and no cache are together what isolates packed documents.
        logits = self.model(input_ids=input_ids, position_ids=position_ids, attention_mask=None, use_cache=False).logits
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )


@torch.no_grad()
def summed(
    model: SummedLoss, split: PackedSplit, rows: npt.NDArray[np.int64], batch_rows: int, at_least: int = 0
) -> float:
    """Summed cross entropy in nats over `rows`, in `at_least` so many passes (workers of a split model make equally many)."""
    was_training = model.training
    model.eval()
    rows = longest_first(rows, split.lengths)
    total, device = 0.0, next(model.parameters()).device
    for first in range(0, len(rows), batch_rows):
        total += float(model(**on(device, batch(split, rows[first : first + batch_rows]))))
    for _ in range(-(-len(rows) // batch_rows), at_least):
        model(**on(device, weightless(split)))
    model.train(was_training)
    return total
