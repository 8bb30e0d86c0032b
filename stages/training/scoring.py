"""What a model is worth on a validation split, in numbers and samples, as a plain function. Apart from `evaluate.py`,
because it imports torch and no ray, so that a task, a test or a notebook can call it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from stages.artifacts import TokenDataset
from stages.contract import StageError
from stages.text.choices import LossOn
from stages.text.corpus import TRAIN, VALIDATION, records
from stages.text.packed import PackedSplit
from stages.text.record import Record
from stages.text.rendering import ChatRefused
from stages.text.templates import Template
from stages.text.turns import chat_of, learned, question_of
from stages.training import model as models
from stages.training.baselines import primed_lzma_bytes, unigram_nats
from stages.training.decode import generate
from stages.training.export import stop_tokens
from stages.training.loss import SummedLoss, summed, supervised_tokens
from stages.training.world import repeatable


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be judged, and how."""

    checkpoint: Path
    base: Path | None
    """The model before training; without one, the same shape with random weights stands in."""
    dataset: Path
    corpus: Path
    seed: int
    samples: int
    prompt_characters: int
    sample_tokens: int
    temperature: float
    primer_bytes: int
    """Most bytes of training text that the compressor reads."""
    batch_rows: int
    threads: int


@dataclass(frozen=True)
class Yardstick:
    """Turns summed nats over predicted tokens into the three usual numbers."""

    tokens: int
    """Predicted tokens of the validation split."""
    uncharged: int
    """Tokens of text that are never predicted: the first of each packed piece. Charged log2(vocabulary) bits."""
    vocab_size: int
    text_bytes: int
    """UTF-8 bytes of what these tokens stand for: of all text that the model is to write."""

    def metrics(self, nats: float) -> dict[str, float]:
        loss = nats / max(self.tokens, 1)
        bits = nats / math.log(2) + self.uncharged * math.log2(self.vocab_size)
        return {
            "validation_loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": bits / max(self.text_bytes, 1),
        }


def score(question: Question) -> dict[str, Any]:
    """Metrics, baselines, samples and findings of one checkpoint. StageError when there is nothing to measure on."""
    with repeatable(question.threads):
        return _score(question)


def _score(question: Question) -> dict[str, Any]:
    train, validation = (PackedSplit.read(question.dataset, split) for split in (TRAIN, VALIDATION))
    facts = TokenDataset(uri=question.dataset.resolve().as_uri()).summary()
    trained = models.load(question.checkpoint)
    before = _before(question, trained)
    yardstick = _yardstick(facts[VALIDATION], validation, trained.config.vocab_size)
    loss_on = LossOn((facts.get("chat_template") or {"loss_on": LossOn.assistant})["loss_on"])
    primed = primed_lzma_bytes(
        (learned(row, loss_on) for row in records(question.corpus, TRAIN)),
        (learned(row, loss_on) for row in records(question.corpus, VALIDATION)),
        question.primer_bytes,
    )
    name = "before" if question.base else "untrained"
    baselines = {
        name: yardstick.metrics(_nats(before, validation, question)),
        "unigram": yardstick.metrics(unigram_nats(train, validation, yardstick.vocab_size)),
        "lzma": {"bits_per_byte": 8 * primed.added / max(primed.text, 1)},
    }
    metrics = yardstick.metrics(_nats(trained, validation, question))
    return {
        "metrics": metrics,
        "baselines": baselines,
        "sources": _by_source(question, facts.get("sources", []), validation, trained),
        "samples": _samples(question, facts, trained, before if question.base else None),
        "findings": findings(metrics, baselines),
        "validation": {
            "documents": facts[VALIDATION]["documents"],
            "text_bytes": yardstick.text_bytes,
            "predicted_tokens": yardstick.tokens,
            "uncharged_tokens": yardstick.uncharged,
            "lzma_primer_bytes": primed.primer,
        },
    }


def _by_source(
    question: Question, sources: list[dict[str, Any]], validation: PackedSplit, trained: Any
) -> dict[str, dict[str, float]]:
    """The three numbers for each source of a mix, where it has validation rows."""
    found = {}
    for source in sources if len(sources) > 1 else []:
        rows = np.flatnonzero(np.array(validation.sources) == source["name"])
        if len(rows):
            part = validation.take(rows)
            yardstick = _yardstick(source[VALIDATION], part, trained.config.vocab_size)
            found[source["name"]] = yardstick.metrics(_nats(trained, part, question))
    return found


def _before(question: Question, trained: Any) -> Any:
    if question.base is not None:
        base = models.load(question.base)
        models.widen(base, trained.config.vocab_size)
        return base
    return models.initialise(trained.config, question.seed).eval()


def _nats(model: Any, validation: PackedSplit, question: Question) -> float:
    return summed(SummedLoss(model), validation, np.arange(len(validation)), question.batch_rows)


def _yardstick(facts: dict[str, Any], validation: PackedSplit, vocab_size: int) -> Yardstick:
    tokens = int(supervised_tokens(validation).sum())
    text_bytes = facts["supervised_bytes"] + facts["unsupervised_bytes"]
    if not tokens or not text_bytes:
        raise StageError(
            f"the validation split has {tokens} predicted tokens and {text_bytes} bytes of text, so nothing can be "
            "measured: give more rows or a larger validation share to the clean stage"
        )
    return Yardstick(tokens, facts["first_tokens"], vocab_size, text_bytes)


def _samples(question: Question, facts: dict[str, Any], trained: Any, before: Any | None) -> list[dict[str, str]]:
    """Continuations of what validation documents begin with, of their prompts, or answers to their chats; each pair from
    the same ids."""
    asking = Asking(question, bool((facts.get("chat_template") or {}).get("as_chat")))
    made: list[dict[str, str]] = []
    total = sum(1 for _ in records(question.corpus, VALIDATION))
    # Spread over the split: neighbours in id order are about the same thing.
    wanted = {number * total // question.samples for number in range(question.samples)}
    for index, record in enumerate(records(question.corpus, VALIDATION)):
        if index not in wanted:
            continue
        start, ids = asking.of(record)
        if not ids:
            continue
        sample = {"id": record.id, "prompt": start}
        for name, model in (("completion", trained), ("before", before)):
            if model is not None:
                new = generate(
                    model,
                    ids,
                    question.sample_tokens,
                    stop=stop_tokens(trained),
                    temperature=question.temperature,
                    seed=int(np.random.SeedSequence([question.seed, index]).generate_state(1)[0]),
                )
                sample[name] = asking.tokenizer.decode(new, skip_special_tokens=True)
        made.append(sample)
    return made


class Asking:
    """Turns a row into what a model is asked about it."""

    def __init__(self, question: Question, as_chat: bool) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(
            question.checkpoint, local_files_only=True, trust_remote_code=False
        )
        self.template = Template.of_model(question.checkpoint)
        self.characters, self.as_chat = question.prompt_characters, as_chat

    def of(self, record: Record) -> tuple[str, list[int]]:
        """(what is shown of the question, its ids); no ids when the model cannot be asked."""
        chat = chat_of(record, self.as_chat)
        if chat is None:
            start = record.prompt or record.text[: self.characters]
            return start, self.tokenizer(start, add_special_tokens=False)["input_ids"]
        messages = question_of(chat[0])
        if self.template is None or not messages:
            return "", []
        try:
            return messages[-1]["content"], self.template.prompt_ids(messages, chat[1])
        except ChatRefused:
            return "", []


def findings(metrics: dict[str, float], baselines: dict[str, dict[str, float]]) -> list[str]:
    """The numbers as sentences that claim no more than was measured."""
    bits = metrics["bits_per_byte"]
    said = [f"The model needs {bits:.2f} bits per byte on the validation text."]
    for name, words in (
        ("before", "The model it started from needs"),
        ("untrained", "The same model with random weights needs"),
        ("unigram", "Frequencies of single tokens alone need"),
        ("lzma", "lzma primed with the training text needs"),
    ):
        if name in baselines:
            other = baselines[name]["bits_per_byte"]
            verdict = "the model is better" if bits < other else "the model is not better"
            if name == "lzma":
                verdict = "the model beats this compressor" if bits < other else "this model does not beat a compressor"
            said.append(f"{words} {other:.2f} bits per byte: {verdict}.")
    return said
