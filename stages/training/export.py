"""Turns a model in memory into a Checkpoint directory. Apart, because fetched and trained models must leave in one form:
weights, tokenizer with its template, generation settings and golden answers. Whether it is what was trained is asked by
`reloaded`, in another process."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from stages.artifacts import Checkpoint
from stages.contract import StageError
from stages.training import adapters
from stages.training import model as models
from stages.training.config import Job
from stages.training.decode import generate, top_logprobs
from stages.training.expected import record

GOLDEN = "golden.json"
GOLDEN_TOKENS = 16
GOLDEN_TOP = 5


def export(
    model: Any, job: Job, summary: dict[str, Any], *, stop_token_ids: Sequence[int], probe: np.ndarray[Any, Any]
) -> None:
    """Write `job.work / "export"` afresh, and beside it what it must be when it is loaded: its logits on `probe` (ids
    [1, length]), and that it stops at every token that it was taught to end with."""
    directory = job.work / "export"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    ids = torch.from_numpy(probe.astype(np.int64))
    facts: dict[str, Any] = {"parameters": models.parameters(model), "trained_parameters": adapters.trained(model)}
    model = _written(model.eval(), job, directory, stop_token_ids, ids)
    shutil.copytree(job.dataset / "tokenizer", directory, dirs_exist_ok=True)
    write_golden(directory, model, job.golden_prompts)
    record(model, job, stop_token_ids, ids)
    facts |= {"architecture": type(model).__name__, "vocab_size": model.config.vocab_size}
    Checkpoint.write(directory, summary | facts)


def _written(model: Any, job: Job, directory: Path, stop_token_ids: Sequence[int], ids: torch.Tensor) -> Any:
    """Write the weights; returns the model as whoever loads them has it. Of an adapted one the corrections are merged into the
    base, in memory whatever leaves; StageError when that changes the logits on `ids`."""
    if not adapters.is_attached(model):
        settle_generation(model, stop_token_ids)
        model.save_pretrained(directory)
        return model
    assert job.recipe.adapter is not None and job.base is not None
    settle_generation(model.get_base_model(), stop_token_ids)
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
    if not job.recipe.adapter.merge:
        adapters.save(model, directory, adapters.identity(job.base, job.base_digest, model.config.vocab_size))
    merged = adapters.merge(model)
    with torch.no_grad():
        found = float((merged(input_ids=ids, use_cache=False).logits - before).abs().max() / before.abs().max())
    if job.recipe.adapter.merge and not found < adapters.MERGE_LIMIT:
        raise StageError(
            f"{directory}: merging the adapter changes logits by {found:.2g} of the largest, wanted below "
            f"{adapters.MERGE_LIMIT}; set adapter.merge=false to keep it apart"
        )
    if job.recipe.adapter.merge:
        merged.save_pretrained(directory)
    else:
        merged.generation_config.save_pretrained(directory)
    return merged


SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def settle_generation(model: Any, stop_token_ids: Sequence[int] = ()) -> None:
    """Make the model stop at `stop_token_ids`, which end training documents and turns, besides where it stopped before.

    Sampling flags beside greedy decoding are dropped: the library refuses to save them, which would lose a trained model
    at the very end.
    """
    settings = model.generation_config or transformers.GenerationConfig()
    known = settings.eos_token_id if settings.eos_token_id is not None else model.config.eos_token_id
    stops = [] if known is None else list(known) if isinstance(known, list | tuple) else [known]
    stops = [*stop_token_ids, *(token for token in stops if token not in stop_token_ids)]
    settings.eos_token_id = None if not stops else stops[0] if len(stops) == 1 else stops
    if settings.pad_token_id is None and stops:
        settings.pad_token_id = stops[0]
    try:
        settings.validate(strict=True)
    except ValueError:
        for name in SAMPLING:
            setattr(settings, name, None)
    model.generation_config = settings
    model.config.eos_token_id = settings.eos_token_id


def stop_tokens(model: Any) -> list[int]:
    """The ids that end this model's answers."""
    stops = model.generation_config.eos_token_id
    return [] if stops is None else list(stops) if isinstance(stops, list) else [stops]


@torch.no_grad()
def difference(first: Any, second: Any, ids: torch.Tensor) -> float:
    """Largest absolute difference of two models' logits on the same ids."""
    return float(
        (first(input_ids=ids, use_cache=False).logits - second(input_ids=ids, use_cache=False).logits).abs().max()
    )


def write_golden(directory: Path, model: Any, prompts: Sequence[str]) -> None:
    """`golden.json`: for each prompt its ids, the greedy continuation and the top log-probabilities of the next token.

    Log-probabilities are rounded to 4 digits: a server with other threads or a cache agrees to about 1e-5.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    stop = stop_tokens(model)
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if not ids:
            raise StageError(f"golden_prompts: {prompt!r} has no tokens; give a prompt of at least one character")
        greedy = generate(model, ids, GOLDEN_TOKENS, stop=stop)
        top = [{"id": i, "logprob": round(value, 4)} for i, value in top_logprobs(model, ids, GOLDEN_TOP)]
        answers.append({"prompt": prompt, "prompt_ids": ids, "greedy_ids": greedy, "top_logprobs": top})
    text = json.dumps(
        {"max_new_tokens": GOLDEN_TOKENS, "answers": answers}, indent=2, sort_keys=True, ensure_ascii=False
    )
    (directory / GOLDEN).write_text(text + "\n", "utf-8")
