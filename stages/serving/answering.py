"""Asks a checkpoint about a window of rows, on a worker. Apart from `batch`, which knows neither rows nor journals."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow

from stages.contract import StageError
from stages.serving.batch import TOKENS_PER_FORWARD, answers, batches, log_probabilities
from stages.serving.model import LoadedModel, load_model
from stages.serving.sampling import Sampling
from stages.text.choices import LossOn
from stages.text.generating import DONE_SCHEMA, Origins
from stages.text.journal import Entry, Journal
from stages.text.questions import Form, Question, Unanswerable, seed_of
from stages.text.record import CHAT, PREFERENCE, Record
from stages.text.tokenizer import Encoder
from stages.training.world import repeatable

if TYPE_CHECKING:
    from stages.text.templates import Template

Encoded = tuple[list[int], list[bool]]
"""Ids, and which of them a score counts (none of a prompt)."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is asked of the checkpoint."""

    form: Form
    chat: bool
    sampling: Sampling
    measured: bool
    """No answers: the mean log-probability of each row's own text."""
    batch_rows: int
    seed: int


class Answering:
    """`Answering(...)(order)` answers what the journal does not have yet of a window; yields how many rows at a time."""

    def __init__(self, *, checkpoint: Path, task: Task, origins: Origins, journal: Path, threads: int) -> None:
        self._loaded = load_model(checkpoint)
        self._encoder = Encoder.load(checkpoint)
        self._template = _template(checkpoint, self._loaded, task)
        self._task, self._origins, self._journal, self._threads = task, origins, Journal(journal), threads
        self._sampling = replace(task.sampling, stop_ids=_stop_ids(self._loaded, task.sampling.stop))

    def __call__(self, order: dict[str, Any]) -> Iterator[pyarrow.Table]:
        known = self._journal.read(order["window"])
        places: list[tuple[int, Record]] = []
        encoded: list[Encoded] = []
        refused: list[tuple[int, Entry]] = []
        for position, record in self._origins.rows(order):
            try:
                encoded.append(self._measured(record) if self._task.measured else (self._prompt(record), []))
                places.append((position, record))
            except Unanswerable as problem:
                refused.append((position, {"bad": problem.reason, "detail": problem.detail}))
        self._journal.add(order["window"], [entry for entry in refused if entry[0] not in known])
        yield _done(len(refused))
        room = TOKENS_PER_FORWARD if self._task.measured else None
        for batch in batches([len(ids) for ids, _ in encoded], self._task.batch_rows, room):
            # A batch is computed whole or not at all: who shares it is part of an answer's last digits.
            if any(places[index][0] not in known for index in batch):
                with repeatable(self._threads):
                    made = self._compute([places[index][1] for index in batch], [encoded[index] for index in batch])
                self._journal.add(
                    order["window"], [(places[index][0], entry) for index, entry in zip(batch, made, strict=True)]
                )
            yield _done(len(batch))

    def _compute(self, records: Sequence[Record], encoded: Sequence[Encoded]) -> list[Entry]:
        rows = [ids for ids, _ in encoded]
        if self._task.measured:
            counted = [marks for _, marks in encoded]
            sums = log_probabilities(self._loaded, rows, counted)
            return [
                {"score": total / sum(marks[1:]), "prompt_tokens": len(ids)}
                for total, marks, ids in zip(sums, counted, rows, strict=True)
            ]
        seeds = [seed_of(self._task.seed, record.id) for record in records]
        return [
            {"text": answer.text, "finished": answer.finished, "tokens": answer.tokens, "prompt_tokens": len(ids)}
            for answer, ids in zip(answers(self._loaded, rows, seeds, self._sampling), rows, strict=True)
        ]

    def _prompt(self, record: Record) -> list[int]:
        question = self._task.form.question(record, chat=self._task.chat)
        ids = self._encode(question.asked) if question.messages is None else self._chat_prompt(question)
        if not ids:
            raise Unanswerable("no_question", "the prompt has no tokens")
        if len(ids) + self._sampling.max_tokens > self._loaded.context_length:
            raise Unanswerable("prompt_too_long", f"{len(ids)} tokens")
        return ids

    def _chat_prompt(self, question: Question) -> list[int]:
        from stages.text.rendering import ChatRefused

        assert self._template is not None and question.messages is not None
        try:
            return self._template.prompt_ids(question.messages, question.tools)
        except ChatRefused as refusal:
            raise Unanswerable(refusal.reason) from None

    def _measured(self, record: Record) -> Encoded:
        """A row's own text (of a chat: what the assistant says), and which of its tokens count."""
        if record.kind in (CHAT, PREFERENCE):
            ids, marks = self._chat(record)
        else:
            before = self._encode(record.prompt)
            (text, _), *_ = self._encoder.encode([record.text], behind=bool(record.prompt))
            ids, marks = [*before, *text.tolist()], [False] * len(before) + [True] * len(text)
        if len(ids) > self._loaded.context_length:
            raise Unanswerable("too_long", f"{len(ids)} tokens")
        if not any(marks[1:]):
            raise Unanswerable("nothing_to_score")
        return ids, marks

    def _chat(self, record: Record) -> Encoded:
        if self._template is None:
            raise Unanswerable("chat_without_template", "the row is a chat, the model has no chat template")
        tools = json.loads(record.tools) if record.tools else None
        encoded = self._template.encode(json.loads(record.messages), tools, LossOn.assistant)
        if encoded.reason is not None:
            raise Unanswerable(encoded.reason)
        return encoded.ids.tolist(), encoded.labelled.tolist()

    def _encode(self, text: str) -> list[int]:
        """With the begin token, if the tokenizer has one; what looks like a control token is text."""
        (ids, _), *_ = self._encoder.encode([text])
        return [*self._encoder.prefix.tolist(), *ids.tolist()]


def _template(checkpoint: Path, loaded: LoadedModel, task: Task) -> "Template | None":
    if not task.chat:
        if task.form.system:
            raise StageError(
                "stages.generate.ask.system is set, but the model is asked without a chat template; leave it out, or write "
                "it into stages.generate.ask.template"
            )
        return None
    from stages.text.templates import Template

    return Template.load(checkpoint, None)


def _stop_ids(loaded: LoadedModel, stop: Sequence[str]) -> frozenset[int]:
    """Control tokens among the stop strings: their text never appears in an answer, so the id must end it."""
    added = loaded.tokenizer.added_tokens_decoder.items()
    return frozenset(number for number, token in added if token.special and token.content in stop)


def _done(rows: int) -> pyarrow.Table:
    return pyarrow.table([[rows]], schema=DONE_SCHEMA)
