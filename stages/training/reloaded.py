"""Asks an exported folder, in a process that has never seen the model, whether it is what was trained. Apart from `export`,
because it is the other side: it knows what `expected` wrote down, and the folder.

The fresh process is forked from a server that has loaded the libraries and nothing else: each but the first takes a fraction of
a second, where starting Python and importing them takes five.
"""

import json
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers

from stages.contract import StageError
from stages.storage.hashing import sha256_file
from stages.training import model as models
from stages.training.expected import FACTS, LOGITS, nats
from stages.training.export import stop_tokens
from stages.training.world import repeatable

LOSS_LIMIT = 1e-6
"""Largest relative difference of the loss."""
TIMEOUT_S, TIMES = 600.0, 20
"""Seconds in which the fresh process must have answered, and how many times what the training process took for the same."""


def require_equal(directory: Path, expected: Path, timeout_s: float | None = None) -> None:
    """StageError unless the folder, loaded in a fresh process, is what was recorded: logits to the bit, loss, terminators,
    tokenizer and template."""
    if timeout_s is None:
        timeout_s = TIMEOUT_S + TIMES * json.loads((expected / FACTS).read_text("utf-8"))["seconds"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(theirs, str(directory), str(expected)), daemon=True)
    child.start()
    theirs.close()
    try:
        if not ours.poll(timeout_s):
            raise StageError(f"{directory}: the exported model did not load and answer in {timeout_s:g} s")
        fault = ours.recv()
    except EOFError:
        child.join()
        fault = f"the process that loaded it ended with {child.exitcode}"
    finally:
        child.kill()
        child.join()
        ours.close()
    if fault is not None:
        raise StageError(f"{directory}: the exported model is not the trained one: {fault}")


def _answer(answers: Connection, directory: str, expected: str) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        answers.send(fault(Path(directory), Path(expected)))
    except StageError as error:
        answers.send(str(error))
    except Exception as error:  # whatever a broken folder makes the library raise
        answers.send(f"{type(error).__name__}: {error} ({traceback.extract_tb(error.__traceback__)[-1].name})")


def fault(directory: Path, expected: Path) -> str | None:
    """What differs from the record, in words, or None."""
    known = json.loads((expected / FACTS).read_text("utf-8"))
    wanted = safetensors.torch.load_file(expected / LOGITS)
    with repeatable(known["threads"]):
        model = models.load(directory, Path(known["base"]) if known["base"] else None)
        with torch.no_grad():
            logits = model(input_ids=wanted["ids"], use_cache=False).logits
        if logits.shape != wanted["logits"].shape:
            return f"logits have shape {list(logits.shape)}, wanted {list(wanted['logits'].shape)}"
        found = float((logits - wanted["logits"]).abs().max())
        if found != 0:
            return f"logits differ by {found:.3g}, wanted exactly 0"
        unknown = sorted(set(known["stop_token_ids"]) - set(stop_tokens(model)))
        if unknown:
            return f"it does not stop at {unknown}, with which its texts end"
        if known["nats"] is not None:
            loss = nats(model, Path(known["dataset"]))
            if abs(loss - known["nats"]) > LOSS_LIMIT * abs(known["nats"]):
                return f"its loss on validation rows is {loss:.6f} nats, wanted {known['nats']:.6f}"
    differing = sorted(name for name, digest in known["tokenizer"].items() if _digest(directory / name) != digest)
    if differing:
        return f"{', '.join(differing)}: not the data set's"
    theirs, ours = (_tokenizer(place) for place in (Path(known["dataset"]) / "tokenizer", directory))
    if ours.chat_template != theirs.chat_template:
        return "its chat template is not the data set's"
    return None


def _tokenizer(directory: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def _digest(file: Path) -> str | None:
    return sha256_file(file) if file.is_file() else None
