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
    """`input_ids`, `position_ids` and next-token `labels` of these rows, all int64 [rows, sequence_length]."""
    labels = np.full((len(rows), split.labels.shape[1]), IGNORED, dtype=np.int64)
    labels[:, :-1] = split.labels[rows, 1:]
    return {
        "input_ids": torch.from_numpy(split.input_ids[rows].astype(np.int64)),
        "position_ids": torch.from_numpy(np.stack([split.position_ids(int(row)) for row in rows]).astype(np.int64)),
        "labels": torch.from_numpy(labels),
    }


def on(device: torch.device, given: Batch) -> Batch:
    """The batch on the device that computes."""
    return {name: tensor.to(device) for name, tensor in given.items()}


def weightless(split: PackedSplit) -> Batch:
    """A row without supervised tokens, for a worker that has no row of its own in a step: it adds exactly zero."""
    row = batch(split, np.zeros(1, dtype=np.int64))
    row["labels"].fill_(IGNORED)
    return row


def real_tokens(split: PackedSplit) -> npt.NDArray[np.int64]:
    """[rows] tokens that are no padding. Padding is the last document of a row where that is one id again and again and
    nothing of it is predicted (a last document of one token looks the same, and is counted as padding)."""
    counts = np.full(len(split), split.input_ids.shape[1], dtype=np.int64)
    for row, starts in enumerate(split.document_starts):
        ids, labels = split.input_ids[row, starts[-1] :], split.labels[row, starts[-1] :]
        if len(starts) > 1 and (ids == ids[0]).all() and (labels == IGNORED).all():
            counts[row] = starts[-1]
    return counts


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
    total, device = 0.0, next(model.parameters()).device
    for first in range(0, len(rows), batch_rows):
        total += float(model(**on(device, batch(split, rows[first : first + batch_rows]))))
    for _ in range(-(-len(rows) // batch_rows), at_least):
        model(**on(device, weightless(split)))
    model.train(was_training)
    return total
