"""What a model thinks of preference pairs that it never saw, beside its reference, as a plain function. Apart from `scoring`,
which measures text: here there are no bytes to be charged for, and two models judge each pair."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from stages.contract import StageError
from stages.text.corpus import VALIDATION
from stages.training import model as models
from stages.training.decode import generate
from stages.training.dpo_loss import PairLoss
from stages.training.export import stop_tokens
from stages.training.preferences import Frozen, Pairs, summed
from stages.training.world import repeatable

OF_ONE_MODEL = ("ranking_accuracy", "logprob_chosen", "logprob_rejected")
"""What can be said of the reference too; the others compare with it."""


@dataclass(frozen=True, kw_only=True)
class PairQuestion:
    """What is to be judged, and how."""

    checkpoint: Path
    base: Path
    """The reference: the model before training."""
    pairs: Path
    beta: float
    """Of the rewards; a checkpoint that dpo trained says its own."""
    seed: int
    samples: int
    sample_tokens: int
    temperature: float
    batch_rows: int
    threads: int


def score(question: PairQuestion) -> dict[str, Any]:
    """Metrics, the reference's beside them, samples and findings. StageError when there is nothing to measure on."""
    if (question.pairs / "tokenizer" / "tokenizer.json").read_bytes() != (
        question.checkpoint / "tokenizer.json"
    ).read_bytes():
        raise StageError(
            "the pairs were tokenized with another tokenizer than the checkpoint's; pair with its base again"
        )
    pairs = Pairs.read(question.pairs, VALIDATION)
    with repeatable(question.threads):
        trained, base = models.load(question.checkpoint), models.load(question.base)
        metrics, before = (_means(policy, base, pairs, question) for policy in (trained, base))
        samples = _samples(trained, base, pairs, question)
    baselines = {"before": {name: before[name] for name in ("validation_loss", *OF_ONE_MODEL)}}
    return {
        "metrics": metrics,
        "baselines": baselines,
        "sources": {},
        "samples": samples,
        "findings": findings(metrics, baselines["before"]),
        "validation": {
            "pairs": len(pairs),
            "predicted_tokens": pairs.tokens(np.arange(len(pairs))),
            "beta": question.beta,
        },
    }


def _means(policy: Any, base: Any, pairs: Pairs, question: PairQuestion) -> dict[str, float]:
    module = PairLoss(policy, beta=question.beta, label_smoothing=0.0, reference=Frozen(base))
    sums = summed(module, pairs, np.arange(len(pairs)), question.batch_rows, stored=False)
    means = {name: value / len(pairs) for name, value in sums.items()}
    return {"validation_loss": means.pop("loss"), **means}


def _samples(trained: Any, base: Any, pairs: Pairs, question: PairQuestion) -> list[dict[str, str]]:
    """What both models answer to prompts of validation pairs, spread over the split."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        question.checkpoint, local_files_only=True, trust_remote_code=False
    )
    made = []
    for row in sorted({number * len(pairs) // question.samples for number in range(question.samples)}):
        prompt = pairs.prompts[row].tolist()
        sample = {"id": pairs.ids[row], "prompt": tokenizer.decode(prompt, skip_special_tokens=True)}
        for name, model in (("completion", trained), ("before", base)):
            seed = int(np.random.SeedSequence([question.seed, row]).generate_state(1)[0])
            new = generate(
                model,
                prompt,
                question.sample_tokens,
                stop=stop_tokens(trained),
                temperature=question.temperature,
                seed=seed,
            )
            sample[name] = tokenizer.decode(new, skip_special_tokens=True)
        made.append(sample)
    return made


def findings(metrics: dict[str, float], before: dict[str, float]) -> list[str]:
    """The numbers as sentences that claim no more than was measured."""
    loss, accuracy = metrics["validation_loss"], metrics["reward_accuracy"]
    learned = "less than that of the reference" if loss < math.log(2) else "not less than that of the reference"
    return [
        f"On {accuracy:.0%} of the validation pairs the model has raised the chosen answer above the rejected one, relative to the "
        f"reference; the margin is {metrics['reward_margin']:.3f} nats on average.",
        f"Its loss is {loss:.4f}: {learned} (ln 2 = {math.log(2):.4f}).",
        f"The chosen answer is the likelier one in {metrics['ranking_accuracy']:.0%} of the pairs, in "
        f"{before['ranking_accuracy']:.0%} before.",
    ]
