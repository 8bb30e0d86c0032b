"""From pairs of token ids to one number: the summed loss of direct preference optimisation (Rafailov et al. 2023), and the
sums that are shown beside it. Apart, because training, validation and evaluation must take the very same loss.

A completion's log-probability is a sum over its own tokens: nothing of the prompt, nothing of the padding. Rows are padded on
the right, where causal attention never looks back from, so neither a mask nor position ids are needed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import cross_entropy, logsigmoid

from stages.training.loss import IGNORED, Batch

Ids = npt.NDArray[np.int32]
Reference = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(input_ids, labels) -> [rows] log-probabilities under the model that the policy is held to."""

SHOWN = (
    "reward_chosen",
    "reward_rejected",
    "reward_margin",
    "reward_accuracy",
    "ranking_accuracy",
    "logprob_chosen",
    "logprob_rejected",
    "drift",
)
"""Means over pairs that are logged at each step. Rewards are `beta` times what the policy adds to the reference's
log-probability, in nats; a pair counts as accurate when the chosen answer's is the larger. `ranking_accuracy` is the share of
pairs whose chosen answer is the likelier one, whatever the reference says (longer answers are less likely). `drift` is half the
squared log ratio of policy and reference, averaged over both answers: an estimate of their divergence that is 0 only where
they agree."""


def padded(prompts: Sequence[Ids], completions: Sequence[Ids]) -> Batch:
    """`input_ids` and next-token `labels` (of the completions alone) of prompts with what follows them, int64 [rows, longest]."""
    longest = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    ids = np.zeros((len(prompts), longest), np.int64)
    labels = np.full_like(ids, IGNORED)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        ids[row, : len(prompt)], ids[row, len(prompt) : end] = prompt, completion
        labels[row, len(prompt) - 1 : end - 1] = completion
    return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def log_probabilities(model: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[rows] float32: the sum of each row's labelled log-probabilities, in nats."""
    logits = model(input_ids=input_ids, attention_mask=None, use_cache=False).logits.float()
    # Positions without a label are left out of the softmax: with a long prompt they are most of it.
    row, _ = (labels != IGNORED).nonzero(as_tuple=True)
    each = -cross_entropy(logits[labels != IGNORED], labels[labels != IGNORED], reduction="none")
    return torch.zeros(len(labels), dtype=each.dtype, device=each.device).index_add(0, row, each)


def sigmoid_loss(
    policy: torch.Tensor, reference: torch.Tensor, weight: torch.Tensor, *, beta: float, label_smoothing: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(summed loss, sums of what is shown) of pairs whose log-probabilities are [2, pairs]: chosen, then rejected.

    `label_smoothing` is the share of pairs that are taken to be labelled the wrong way round (conservative DPO). `weight`
    [pairs] is 1, or 0 for a pair that only fills a batch.
    """
    ratio = policy - reference
    logits = beta * (ratio[0] - ratio[1])
    losses = -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
    with torch.no_grad():
        reward = beta * ratio
        values = (
            *reward,
            reward[0] - reward[1],
            (reward[0] > reward[1]).float(),
            (policy[0] > policy[1]).float(),
            *policy,
            ratio.square().mean(dim=0) / 2,
        )
        shown = {name: (value.double() * weight).sum() for name, value in zip(SHOWN, values, strict=True)}
    return (losses * weight).sum(), shown


class PairLoss(torch.nn.Module):
    """A model whose output is the summed loss of pairs: never a mean, because only the caller knows how many pairs the
    whole step has over all workers and accumulated batches."""

    def __init__(self, model: Any, *, beta: float, label_smoothing: float, reference: Reference | None) -> None:
        super().__init__()
        self.model, self.reference = model, reference
        self.beta, self.label_smoothing = beta, label_smoothing

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        weight: torch.Tensor,
        reference: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Rows are the chosen answers of all pairs, then the rejected ones; both go through the model together.
        `reference` [2, pairs] is given where it is stored."""
        if reference is None:
            assert self.reference is not None
            with torch.no_grad():
                reference = self.reference(input_ids, labels).unflatten(0, (2, -1))
        policy = log_probabilities(self.model, input_ids, labels).unflatten(0, (2, -1))
        return sigmoid_loss(policy, reference, weight, beta=self.beta, label_smoothing=self.label_smoothing)
