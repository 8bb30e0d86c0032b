"""What a trained model must still be when somebody else loads it, written down by the process that trained it. Apart from
`reloaded`, which asks it of the exported folder: one writes before the model leaves memory, the other has never seen it.

`expected/`: `expected.json` (terminators, digests of the tokenizer's files, the loss on some rows) and `logits.safetensors`
(ids, logits).
"""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from stages.storage.hashing import sha256_file
from stages.text.packed import PackedSplit
from stages.training.config import Job, TokenRecipe
from stages.training.loss import SummedLoss, summed

FACTS, LOGITS = "expected.json", "logits.safetensors"
ROWS, TOKENS = 32, 8_192
"""Rows of the validation split on which the loss is compared, and tokens of them: all of a small one, and at least one row."""


def record(model: Any, job: Job, stop_token_ids: Sequence[int], ids: torch.Tensor) -> None:
    """Write `job.work / "expected"`: what `model`, in memory, is."""
    directory = job.work / "expected"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    began = time.monotonic()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    safetensors.torch.save_file({"ids": ids, "logits": logits.contiguous()}, directory / LOGITS)
    tokenizer = sorted(file for file in (job.dataset / "tokenizer").iterdir() if file.is_file())
    facts = {
        "stop_token_ids": list(stop_token_ids),
        "tokenizer": {file.name: sha256_file(file) for file in tokenizer},
        "nats": nats(model, job.dataset) if isinstance(job.recipe, TokenRecipe) else None,
        "dataset": str(job.dataset),
        "base": str(job.base) if job.base else None,
        "threads": job.threads,
    }
    facts["seconds"] = time.monotonic() - began
    (directory / FACTS).write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", "utf-8")


def nats(model: Any, dataset: Path) -> float:
    """Summed loss on the first validation rows of a set of packed rows."""
    split = PackedSplit.read(dataset, "validation")
    rows = max(1, min(ROWS, TOKENS // split.input_ids.shape[1], len(split)))
    return summed(SummedLoss(model), split, np.arange(rows), 1)
