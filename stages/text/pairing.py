"""What pair does to preference rows, on the workers. Apart, because Ray ships it to them.

The prompt is tokenised once and both completions follow it: what a server would be fed ends where they begin, and each ends
with the token that ends the assistant's turn. Nothing of the prompt, and nothing behind that token, is ever in the loss.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow

from stages.text.blocks import FACTS_SCHEMA
from stages.text.choices import ControlStrings, LossOn, OverLongPair
from stages.text.corpus import SPLITS
from stages.text.pairs import PAIRS_SCHEMA, REFERENCE
from stages.text.record import FIELDS, PREFERENCE, Record
from stages.text.rendering import ChatRefused
from stages.text.shards import DROPPED_SCHEMA, Table, shard_name, write_shard
from stages.text.templates import Template

if TYPE_CHECKING:
    from stages.serving.model import LoadedModel

ROWS_PER_WINDOW = 512
REASONS = {
    "not_preference": "the row is of another kind",
    "prompt_moves": "the template writes the prompt in another way before an answer",
    "other_turns": "a completion holds turns that are not the assistant's",
    "identical": "chosen and rejected are the same tokens",
    "too_long": "prompt and completion above stages.pair.sequence_length",
}
"""Why rows leave, besides what the template says of a chat that it does not take."""

Int32 = npt.NDArray[np.int32]


class Unpaired(Exception):
    """This row makes no pair: `reason` is a code."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Pair:
    """One preference row in tokens."""

    id: str
    source: str
    prompt: Int32
    chosen: Int32
    rejected: Int32
    cut: int = 0
    """Tokens of the prompt that were cut off."""

    @property
    def length(self) -> int:
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides how rows become pairs."""

    chat_template: str | None
    control_strings: ControlStrings
    sequence_length: int
    over_long: OverLongPair
    reference: bool
    batch_rows: int


class Pairing:
    """`Pairing(...)(order)` turns one window of the corpus into pairs, apart for each split, and writes them; yields counts.

    A window that a killed run has written is not made again: its counts are written last.
    """

    def __init__(self, *, base: Path, corpus: Table, settings: Settings, windows: Path, threads: int) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Ray spreads the windows; threads beneath would only compete
        self._template = Template.load(base, settings.chat_template, settings.control_strings)
        self._corpus, self._settings, self._windows, self._threads = corpus, settings, windows, threads
        self._loaded: LoadedModel | None = None
        if settings.reference:
            from stages.serving.model import load_model

            self._loaded = load_model(base)

    def __call__(self, order: dict[str, Any]) -> Iterator[pyarrow.Table]:
        facts = self._windows / "facts" / f"{order['window']:08d}.json"
        if not facts.exists():
            counts = self._make(order)
            partial = facts.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(json.dumps(counts), "utf-8")
            partial.replace(facts)
        yield pyarrow.table([[facts.read_text("utf-8")]], schema=FACTS_SCHEMA)

    def _make(self, order: dict[str, Any]) -> dict[str, Counter[str]]:
        found: dict[str, list[Pair]] = {split: [] for split in SPLITS}
        counts = {split: Counter[str]() for split in SPLITS}
        dropped: list[tuple[str, str, str]] = []
        for record, split in self._records(order):
            counts[split]["in"] += 1
            try:
                found[split].append(self._fit(self._pair(record)))
            except Unpaired as why:
                counts[split][why.reason] += 1
                dropped.append((record.id, why.reason, why.detail))
        for split, pairs in found.items():
            counts[split].update(pairs=len(pairs), truncated=sum(pair.cut > 0 for pair in pairs))
            counts[split].update(truncated_tokens=sum(pair.cut for pair in pairs))
            for name in ("prompt", "chosen", "rejected"):
                counts[split][f"{name}_tokens"] += sum(len(getattr(pair, name)) for pair in pairs)
            write_shard(self._windows / split / shard_name(order["window"]), self._table(pairs))
        columns = list(zip(*dropped, strict=True)) or [(), (), ()]
        table = pyarrow.table([pyarrow.array(column, pyarrow.string()) for column in columns], schema=DROPPED_SCHEMA)
        write_shard(self._windows / "dropped" / shard_name(order["window"]), table)
        return counts

    def _records(self, order: dict[str, Any]) -> Iterator[tuple[Record, str]]:
        for part in self._corpus.slices(order["first"], order["last"]):
            for *values, split in zip(*(part.column(name).to_pylist() for name in (*FIELDS, "split")), strict=True):
                yield Record(*values), split

    def _pair(self, record: Record) -> Pair:
        if record.kind != PREFERENCE:
            raise Unpaired("not_preference", record.kind)
        messages, tools = json.loads(record.messages or "[]"), json.loads(record.tools) if record.tools else None
        try:
            prompt = np.array(self._template.prompt_ids(messages, tools), np.int32)
        except ChatRefused as refusal:
            raise Unpaired(refusal.reason, "prompt") from None
        chosen, rejected = (
            self._completion(prompt, messages, json.loads(given), tools, name)
            for name, given in (("chosen", record.chosen), ("rejected", record.rejected))
        )
        if np.array_equal(chosen, rejected):
            raise Unpaired("identical")
        return Pair(record.id, record.source, prompt, chosen, rejected)

    def _completion(self, prompt: Int32, messages: list[Any], answer: list[Any], tools: Any, name: str) -> Int32:
        """What follows the prompt, up to and with the token that ends the assistant's turn."""
        if any(message["role"] != "assistant" for message in answer):
            raise Unpaired("other_turns", name)
        whole = self._template.encode([*messages, *answer], tools, LossOn.assistant)
        if whole.reason is not None:
            raise Unpaired(whole.reason, name)
        if len(whole.ids) <= len(prompt) or not np.array_equal(whole.ids[: len(prompt)], prompt):
            raise Unpaired("prompt_moves", name)
        learned = np.flatnonzero(whole.labelled[len(prompt) :])
        if not len(learned):
            raise Unpaired("no_answer", name)
        completion: Int32 = whole.ids[len(prompt) : len(prompt) + learned[-1] + 1]
        if len(learned) != len(completion):  # several turns: between them stands what the template writes
            raise Unpaired("other_turns", name)
        return completion

    def _fit(self, pair: Pair) -> Pair:
        over = pair.length - self._settings.sequence_length
        if over <= 0:
            return pair
        word = self._template.renderer.special_tokens.get("bos_token")
        begin = 1 if word and pair.prompt[0] == self._template.tokenizer.token_to_id(word) else 0
        # One token of the prompt must stay for the first of the completion to be predicted from.
        if self._settings.over_long is OverLongPair.drop or over >= len(pair.prompt) - begin:
            raise Unpaired("too_long", f"{pair.length} tokens")
        return replace(pair, prompt=np.concatenate([pair.prompt[:begin], pair.prompt[begin + over :]]), cut=over)

    def _table(self, pairs: list[Pair]) -> pyarrow.Table:
        columns = [[pair.id for pair in pairs], [pair.source for pair in pairs]]
        columns += [_lists([getattr(pair, name) for pair in pairs]) for name in ("prompt", "chosen", "rejected")]
        table = pyarrow.table(columns, schema=PAIRS_SCHEMA)
        if self._loaded is None:
            return table
        for name, side in zip(REFERENCE, ("chosen", "rejected"), strict=True):
            values = self._reference(pairs, side)
            table = table.append_column(pyarrow.field(name, pyarrow.float32(), nullable=False), pyarrow.array(values))
        return table

    def _reference(self, pairs: list[Pair], side: str) -> npt.NDArray[np.float32]:
        """Summed log-probability of each completion under the base, in evaluation mode, in batches of like length."""
        from stages.serving.batch import TOKENS_PER_FORWARD, batches, log_probabilities
        from stages.training.world import repeatable

        assert self._loaded is not None
        rows = [np.concatenate([pair.prompt, getattr(pair, side)]).tolist() for pair in pairs]
        counted = [
            [place >= len(pair.prompt) for place in range(len(row))] for pair, row in zip(pairs, rows, strict=True)
        ]
        values = np.zeros(len(pairs), np.float32)
        with repeatable(self._threads):
            for batch in batches([len(row) for row in rows], self._settings.batch_rows, TOKENS_PER_FORWARD):
                values[batch] = log_probabilities(
                    self._loaded, [rows[index] for index in batch], [counted[index] for index in batch]
                )
        return values


def _lists(rows: list[Int32]) -> pyarrow.ListArray:
    """Ragged rows as a plain list<int32>."""
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.concatenate(rows) if rows else np.zeros(0, np.int32)
    return pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(values.astype(np.int32)))
