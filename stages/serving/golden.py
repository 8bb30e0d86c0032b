"""Golden questions: what a model answered where it was made, asked again wherever it is loaded. Apart, because train
writes them, and register (in a clean process), a new replica and the roll-out each ask them.

`golden.json`: {"dtype": "float32", "questions": [{"prompt": text, "prompt_ids": [...], "greedy_ids": [...],
"top_logprobs": [[id, log-probability], ... best first] of the first token after the prompt}]}.

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
MAX_TOKENS = 16
TOP = 5
TOLERANCE = 1e-3
"""Largest difference of a log-probability. Equal ids are demanded outright: float32 on both sides."""


@dataclass(frozen=True)
class Question:
    """A prompt and the text that greedy decoding must give for it."""

    prompt_ids: list[int]
    max_tokens: int
    text: str


def prompt_ids(loaded: Any, prompt: str) -> list[int]:
    """Ids of a prompt as the server tokenizes it; an empty one is the start of a document."""
    ids: list[int] = loaded.tokenizer(prompt).input_ids
    return ids or [loaded.start_id]


def write_golden(directory: Path, prompts: Sequence[str]) -> None:
    """Answer `prompts` with the model in `directory` and keep the answers beside it."""
    from stages.serving.model import load_model

    loaded = load_model(directory)
    questions = []
    for prompt in prompts:
        ids = prompt_ids(loaded, prompt)
        values, tokens = _first_logprobs(loaded, ids).topk(min(TOP, loaded.vocab_size))
        top = [[int(token), round(float(value), 6)] for token, value in zip(tokens, values, strict=True)]
        greedy_ids = _greedy(loaded, ids, MAX_TOKENS)
        questions.append({"prompt": prompt, "prompt_ids": ids, "greedy_ids": greedy_ids, "top_logprobs": top})
    text = json.dumps({"dtype": "float32", "questions": questions}, indent=1, ensure_ascii=False)
    (directory / GOLDEN).write_text(text + "\n", "utf-8")


def read_golden(directory: Path) -> list[dict[str, Any]]:
    """The recorded questions; StageError when there are none or the file is not what it should be."""
    path = directory / GOLDEN
    try:
        questions: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["questions"]
        for question in questions:
            assert isinstance(question["prompt"], str) and question["prompt_ids"]
            assert question["greedy_ids"] and question["top_logprobs"]
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise StageError(
            f"{path}: no readable golden questions ({type(error).__name__}); train the model again"
        ) from error
    if not questions:
        raise StageError(f"{path}: there are no golden questions; a model that nobody asked cannot be served")
    return questions


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
    from stages.serving.generate import Sampling, generate

    return list(generate(loaded, prompt_ids, Sampling(max_tokens=max_tokens, temperature=0.0)))


def _first_logprobs(loaded: Any, prompt_ids: Sequence[int]) -> Any:
    """Log-probabilities [vocab_size] of the token after the prompt."""
    from transformers import DynamicCache

    from stages.serving.generate import next_logits

    return next_logits(loaded, prompt_ids, DynamicCache(config=loaded.model.config)).log_softmax(-1)


def _difference(loaded: Any, question: dict[str, Any]) -> str | None:
    """What differs from the record, in words, or None."""
    if prompt_ids(loaded, question["prompt"]) != question["prompt_ids"]:
        return "its prompt is tokenized differently"
    logprobs = _first_logprobs(loaded, question["prompt_ids"])
    for token, wanted in question["top_logprobs"]:
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
