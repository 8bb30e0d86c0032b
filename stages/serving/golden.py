"""Golden questions: what a model answered where it was made, asked again wherever it is loaded. Apart, because register
(in a clean process), each new replica and the roll-out all ask them.

`golden.json`: {"answers": [{"prompt": text, "prompt_ids": [...], "greedy_ids": [...], "top_logprobs": [{"id", "logprob"},
... best first] of the first token after the prompt}]}; the export of training writes it.

`python -m stages.serving.golden DIRECTORY` loads the model in this process alone, asks, and exits 0 or says why not
on stderr.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.contract import StageError

GOLDEN = "golden.json"
TOLERANCE = 1e-3
"""Largest difference of a log-probability. Equal ids are demanded outright: float32 on both sides."""


@dataclass(frozen=True)
class Question:
    """A prompt and the text that greedy decoding must give for it."""

    prompt_ids: list[int]
    max_tokens: int
    text: str


def read_golden(directory: Path) -> list[dict[str, Any]]:
    """The recorded questions; StageError when there are none or the file is not what it should be."""
    path = directory / GOLDEN
    try:
        answers: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["answers"]
        for question in answers:
            assert isinstance(question["prompt"], str) and question["prompt_ids"]
            assert question["greedy_ids"] and question["top_logprobs"]
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise StageError(
            f"{path}: no readable golden questions ({type(error).__name__}); train the model again"
        ) from error
    if not answers:
        raise StageError(f"{path}: there are no golden questions; a model that nobody asked cannot be served")
    return answers


def check_golden(loaded: Any, directory: Path) -> list[Question]:
    """Ask a loaded model; StageError at the first answer that differs, else the questions for asking over HTTP."""
    from stages.serving.text_stream import TextStream

    asked = []
    for number, question in enumerate(read_golden(directory)):
        difference = _difference(loaded, question)
        if difference:
            raise StageError(
                f"{directory}: golden question {number}: {difference}; weights, tokenizer or configuration "
                f"are not those that wrote {GOLDEN}"
            )
        stream = TextStream(loaded.backend, question["prompt_ids"], ())
        text = "".join(stream.push(token) for token in question["greedy_ids"] if token not in loaded.eos_ids)
        asked.append(Question(question["prompt_ids"], len(question["greedy_ids"]), text + stream.flush()))
    return asked


def check_in_clean_process(directory: Path, timeout_s: float) -> None:
    """Load and ask in a child process that shares nothing with this one; StageError carries the child's reason."""
    root = Path(__file__).resolve().parents[2]
    env = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    env |= {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "stages.serving.golden", str(directory)]
    try:
        child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise StageError(f"{directory}: the model did not load and answer in {timeout_s:g} s") from error
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"the process ended with {child.returncode}"]
        raise StageError(f"the model does not load back in a clean process: {lines[-1]}")


def _greedy(loaded: Any, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
    from stages.serving.generate import generate
    from stages.serving.sampling import Sampling

    return list(generate(loaded, prompt_ids, Sampling(max_tokens=max_tokens, temperature=0.0)))


def _first_logprobs(loaded: Any, prompt_ids: Sequence[int]) -> Any:
    """Log-probabilities [vocab_size] of the token after the prompt."""
    from stages.serving.generate import next_logits

    return next_logits(loaded, prompt_ids, loaded.new_cache()).log_softmax(-1)


def _difference(loaded: Any, question: dict[str, Any]) -> str | None:
    """What differs from the record, in words, or None."""
    if loaded.tokenizer(question["prompt"], add_special_tokens=False).input_ids != question["prompt_ids"]:
        return "its prompt is tokenized differently"
    logprobs = _first_logprobs(loaded, question["prompt_ids"])
    for entry in question["top_logprobs"]:
        token, wanted = entry["id"], entry["logprob"]
        got = float(logprobs[token]) if 0 <= token < logprobs.numel() else -math.inf
        if not math.isclose(got, wanted, abs_tol=TOLERANCE):
            return f"token {token} has log-probability {got:.6f}, recorded was {wanted:.6f}"
    greedy_ids = _greedy(loaded, question["prompt_ids"], len(question["greedy_ids"]))
    if greedy_ids != question["greedy_ids"]:
        pairs = zip(greedy_ids, question["greedy_ids"], strict=False)
        at = next((i for i, (got, wanted) in enumerate(pairs) if got != wanted), len(greedy_ids))
        return f"the answer differs from token {at} on"
    return None


def main(directory: str) -> int:
    from stages.serving.model import load_model

    path = Path(directory)
    try:
        check_golden(load_model(path), path)
    except StageError as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
