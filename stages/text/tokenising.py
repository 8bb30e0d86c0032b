"""What tokenize does to documents, on the workers. Apart, because Ray ships these functions to them.

First each window of documents becomes pieces of at most one row's length, kept in files for each split and source; then
groups of pieces become rows; then rows are cut into shards. Windows and groups depend on nothing but the corpus and bound
memory, whatever the number of blocks.

A document of text is its tokens and one EOS. Prompt and completion are tokenised apart and joined, so that the boundary is
exact whatever the text; loss is taken on completion and EOS. A chat is what its template makes of it.
"""

import functools
import itertools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet

from stages.text.blocks import FACTS_SCHEMA
from stages.text.choices import ControlStrings, LossOn, OverLong, Packing
from stages.text.corpus import TRAIN, records, shards
from stages.text.packing import assemble, pack
from stages.text.pieces import Document, Pieces
from stages.text.record import CHAT, FIELDS, PROMPT_COMPLETION, Record
from stages.text.shards import Table, shard_name, write_shard
from stages.text.tally import LINES_SHOWN
from stages.text.tokenizer import Encoder, train
from stages.text.turns import chat_of, prose

if TYPE_CHECKING:
    from stages.text.templates import Chat, Encoded, Template

DOCUMENTS_PER_WINDOW = 1_024
PACKED_SCHEMA = pyarrow.schema(
    [
        *((name, pyarrow.list_(pyarrow.int32())) for name in ("input_ids", "labels", "document_starts")),
        pyarrow.field("source", pyarrow.string(), nullable=False),
    ]
)
NOTHING = (np.zeros(0, np.int32), np.zeros(0, np.int32))
LEFT_SCHEMA = pyarrow.schema([pyarrow.field(name, pyarrow.string(), nullable=False) for name in ("id", "reason")])


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What makes tokens of a document."""

    tokenizer: Path
    """Its directory, with the chat template that chats are written in."""
    sequence_length: int
    over_long: OverLong
    packing: Packing
    as_chat: bool
    loss_on: LossOn
    control_strings: ControlStrings


def train_tokenizer(corpus: Path, vocab_size: int, control_tokens: list[str], directory: Path) -> None:
    """On the training split alone: what a tokenizer saw of the validation text would flatter the model."""
    train(
        (part for record in records(corpus, TRAIN) for part in prose(record)),
        vocab_size,
        directory,
        control_tokens,
    )


def samples(corpus: Path, settings: Settings, count: int) -> "list[Chat]":
    """The first rows of the training split that the chat template is to write."""
    if not kinds(corpus) & ({CHAT, PROMPT_COMPLETION} if settings.as_chat else {CHAT}):
        return []  # found out without reading the texts
    chats = (chat_of(record, settings.as_chat) for record in records(corpus, TRAIN))
    return list(itertools.islice((chat for chat in chats if chat is not None), count))


def kinds(corpus: Path) -> set[str]:
    """The kinds of rows that a corpus holds."""
    columns = (pyarrow.parquet.read_table(shard, columns=["kind"]).column(0) for shard in shards(corpus))
    return {kind for column in columns for kind in column.unique().to_pylist()}


def tokenise_window(
    order: dict[str, Any], corpus: Table, settings: Settings, chunks: Path, left: Path
) -> Iterator[pyarrow.Table]:
    """Tokenise the documents of one window into files of pieces, apart for each split and source; report the counts."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # Ray spreads the windows; threads would only compete
    window = order["window"]
    found: dict[tuple[str, str], Pieces] = {}
    gone: list[tuple[str, str]] = []
    came: Counter[str] = Counter()
    for part in corpus.slices(order["first"], order["last"]):
        records = [Record(*values) for values in zip(*(part.column(n).to_pylist() for n in FIELDS), strict=True)]
        for record, split, made in zip(
            records, part.column("split").to_pylist(), _documents(records, settings), strict=True
        ):
            came[split] += 1
            key = (split, record.source)
            if key not in found:
                found[key] = Pieces(chunks, f"{window:06d}-{len(found):04d}")
            reason = (
                made if isinstance(made, str) else found[key].add(made, settings.sequence_length, settings.over_long)
            )
            if reason is not None:
                gone.append((record.id, reason))
    for pieces in found.values():
        pieces.flush()
    if gone:
        columns = [list(column) for column in zip(*gone, strict=True)]
        write_shard(left / shard_name(window), pyarrow.table(columns, schema=LEFT_SCHEMA))
    facts = {
        "window": window,
        "came": came,
        "reasons": Counter(reason for _, reason in gone),
        "first": _first(gone),
        "found": [
            {"split": split, "source": source, "counts": pieces.counts, "chunks": pieces.chunks}
            for (split, source), pieces in found.items()
        ],
    }
    yield pyarrow.table([[json.dumps(facts)]], schema=FACTS_SCHEMA)


def pack_group(order: dict[str, Any], settings: Settings, chunks: Path, packed: Path) -> Iterator[pyarrow.Table]:
    """Put the pieces of some chunks, which are of one source, into rows."""
    encoder, width = _encoder(settings.tokenizer), settings.sequence_length
    loaded = [np.load(chunks / name) for name in order["chunks"]]
    ids, labelled, lengths = (np.concatenate([one[name] for one in loaded]) for name in ("ids", "labelled", "lengths"))
    alone = settings.packing is Packing.none
    rows = [[piece] for piece in range(len(lengths))] if alone else pack(lengths.tolist(), width)
    inputs, labels, starts, counts = assemble(ids, labelled, lengths, rows, width, encoder.pad_id)
    full = np.full(len(rows), width)
    sources = pyarrow.array([order["source"]] * len(rows), pyarrow.string())
    columns = [_lists(inputs.reshape(-1), full), _lists(labels.reshape(-1), full), _lists(starts, counts), sources]
    table = pyarrow.table(columns, schema=PACKED_SCHEMA)
    write_shard(packed / order["split"] / shard_name(order["group"]), table, compression="none")  # read once, soon
    facts = {"split": order["split"], "source": order["source"], "rows": len(rows)}
    yield pyarrow.table([[json.dumps(facts)]], schema=FACTS_SCHEMA)


def write_packed(order: dict[str, Any], packed: dict[str, Table], output: Path) -> Iterator[pyarrow.Table]:
    """Write one shard of one table from the files that its rows stand in."""
    name = order["table"]
    table = pyarrow.concat_tables(packed[name].slices(order["first"], order["last"])).combine_chunks()
    write_shard(output / name / shard_name(order["shard"]), table)
    yield pyarrow.table([[json.dumps({"rows": table.num_rows})]], schema=FACTS_SCHEMA)


def _documents(batch: list[Record], settings: Settings) -> Iterator[Document | str]:
    """For each record its tokens, or the reason why there are none."""
    chats = [chat_of(record, settings.as_chat) for record in batch]
    encoder = _encoder(settings.tokenizer)
    plain = [record for record, chat in zip(batch, chats, strict=True) if chat is None]
    # A document ends once, also when its text already ends in the words for it.
    texts = encoder.encode([record.text.removesuffix(encoder.eos) for record in plain if not record.prompt])
    prompts = encoder.encode([record.prompt for record in plain if record.prompt])
    answers = [record.text.removesuffix(encoder.eos) for record in plain if record.prompt]
    completions = encoder.encode(answers, behind=True)
    templated: Iterator[Encoded] = iter(())
    if len(plain) < len(batch):
        template = _template(settings.tokenizer, settings.control_strings)
        templated = iter(template.encode_batch([chat for chat in chats if chat is not None], settings.loss_on))
    for record, chat in zip(batch, chats, strict=True):
        if chat is None:
            both = (next(prompts), next(completions)) if record.prompt else (NOTHING, next(texts))
            yield Document.of(encoder, *both)
        else:
            encoded = next(templated)
            yield encoded.reason or Document.of_chat(encoded)


def _first(gone: list[tuple[str, str]]) -> dict[str, list[str]]:
    """The first ids for each reason."""
    first: dict[str, list[str]] = defaultdict(list)
    for identifier, reason in gone:
        if len(first[reason]) < LINES_SHOWN:
            first[reason].append(identifier)
    return first


@functools.cache
def _encoder(directory: Path) -> Encoder:
    return Encoder.load(directory)


@functools.cache
def _template(directory: Path, control_strings: ControlStrings) -> "Template":
    from stages.text.templates import Template

    return Template.load(directory, None, control_strings)


def _lists(values: npt.NDArray[np.int32], counts: npt.NDArray[np.int64]) -> pyarrow.ListArray:
    """A plain list<int32> of these many values each."""
    offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
    return pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(values))
