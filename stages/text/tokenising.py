"""What tokenize does to documents, on the workers. Apart, because Ray ships these functions to them.

First each window of documents becomes pieces of at most one row's length, kept in files for each split and source; then
groups of pieces become rows; then rows are cut into shards. Windows and groups depend on nothing but the corpus and bound
memory, whatever the number of blocks.

A document of text is its tokens and one EOS. Prompt and completion are tokenised apart and joined, so that the boundary is
exact whatever the text; loss is taken on completion and EOS. A chat is what its template makes of it. The first token of a
piece has no label, since nothing in the row predicts it: when it is text to learn, its bytes are counted apart, so that
evaluation can charge them and bits per byte stay exact.
"""

import functools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow

from stages.contract import StageError
from stages.text.choices import OverLong, Packing
from stages.text.cleaning import FACTS_SCHEMA
from stages.text.corpus import TRAIN, documents
from stages.text.packing import Int32, assemble, fitted, pack
from stages.text.record import CHAT, FIELDS, PREFERENCE, Record
from stages.text.shards import Table, shard_name, write_shard
from stages.text.tokenizer import Encoder, train

DOCUMENTS_PER_WINDOW = 2_048
TOKENS_PER_CHUNK = 1 << 20
"""A file of pieces ends here, so that a window of books takes no more memory than one of sentences."""
LINES_SHOWN = 5
PACKED_SCHEMA = pyarrow.schema(
    [
        *((name, pyarrow.list_(pyarrow.int32())) for name in ("input_ids", "labels", "document_starts")),
        pyarrow.field("source", pyarrow.string(), nullable=False),
    ]
)
LEFT_SCHEMA = pyarrow.schema([pyarrow.field(name, pyarrow.string(), nullable=False) for name in ("id", "reason")])


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What makes tokens of a document."""

    tokenizer: Path
    sequence_length: int
    over_long: OverLong
    packing: Packing


@dataclass(frozen=True)
class Document:
    """Token ids; for each whether it is to be learned, and its UTF-8 bytes when it stands for text."""

    ids: Int32
    labelled: npt.NDArray[np.bool_]
    sizes: Int32
    prompt_tokens: int
    prompt_bytes: int

    @classmethod
    def of(cls, encoder: Encoder, prompt: tuple[Int32, Int32], text: tuple[Int32, Int32]) -> "Document":
        """Begin token (if the tokenizer has one), prompt, text, EOS."""
        given = len(encoder.prefix) + len(prompt[0])
        ids = np.concatenate([encoder.prefix, prompt[0], text[0], np.array([encoder.eos_id], np.int32)])
        sizes = np.concatenate([np.zeros(given, np.int32), text[1], np.zeros(1, np.int32)])
        return cls(ids, np.arange(len(ids)) >= given, sizes, len(prompt[0]), int(prompt[1].sum()))


class Pieces:
    """The pieces of one split of one source in a window: written to a file each time that they are many."""

    def __init__(self, directory: Path, stem: str) -> None:
        self.directory, self.stem = directory, stem
        self.counts: Counter[str] = Counter()
        self.chunks: list[dict[str, Any]] = []
        self._ids: list[Int32] = []
        self._labelled: list[npt.NDArray[np.bool_]] = []
        self._tokens = 0

    def add(self, document: Document, sequence_length: int, over_long: OverLong) -> str | None:
        """Cut a document to size, take the label from each first token, leave out pieces without any label. The reason
        when nothing of the document stays."""
        if not document.labelled[1:].any():
            return "no_supervised_tokens"
        spans = fitted(len(document.ids), sequence_length, over_long)
        if not spans:
            return "over_long"
        before = len(self._ids)
        counts: Counter[str] = Counter()
        for start, end in spans:
            labelled, sizes = document.labelled[start:end].copy(), document.sizes[start:end]
            unscored = int(labelled[0])
            labelled[0] = False
            if not labelled.any():
                counts.update(dropped_pieces=1, dropped_tokens=end - start)
                continue
            self._ids.append(document.ids[start:end])
            self._labelled.append(labelled)
            counts.update(
                pieces=1,
                tokens=end - start,
                supervised_tokens=int(labelled.sum()),
                supervised_bytes=int(sizes[labelled].sum()),
                first_tokens=unscored,
                unsupervised_bytes=unscored * int(sizes[0]),
            )
        if len(self._ids) == before:
            return "answer_cut_off"
        cut = len(document.ids) - spans[-1][1]
        counts.update(truncated_documents=int(cut > 0), truncated_tokens=cut)
        counts.update(documents=1, prompt_tokens=document.prompt_tokens, prompt_bytes=document.prompt_bytes)
        self.counts.update(counts)
        self._tokens += counts["tokens"]
        if self._tokens >= TOKENS_PER_CHUNK:
            self.flush()
        return None

    def flush(self) -> None:
        """Write what has come together as one file of pieces: plain arrays, one behind the other."""
        if not self._ids:
            return
        name = f"{self.stem}-{len(self.chunks):05d}.npz"
        partial = self.directory / f"{name}.{os.getpid()}.partial"
        lengths = np.fromiter(map(len, self._ids), np.int64, len(self._ids))
        with partial.open("wb") as file:
            np.savez(file, ids=np.concatenate(self._ids), labelled=np.concatenate(self._labelled), lengths=lengths)
        partial.replace(self.directory / name)
        self.chunks.append({"name": name, "tokens": self._tokens})
        self._ids, self._labelled, self._tokens = [], [], 0


def train_tokenizer(corpus: Path, vocab_size: int, directory: Path) -> None:
    """On the training split alone: what a tokenizer saw of the validation text would flatter the model."""
    train((part for _, *parts in documents(corpus, TRAIN) for part in parts if part), vocab_size, directory)


def tokenise_window(
    order: dict[str, Any], corpus: Table, settings: Settings, chunks: Path, left: Path
) -> Iterator[pyarrow.Table]:
    """Tokenise the documents of one window into files of pieces, apart for each split and source; report the counts."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Ray spreads the windows; threads beneath would only compete
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
    write_shard(packed / order["split"] / shard_name(order["group"]), pyarrow.table(columns, schema=PACKED_SCHEMA))
    facts = {"split": order["split"], "source": order["source"], "rows": len(rows)}
    yield pyarrow.table([[json.dumps(facts)]], schema=FACTS_SCHEMA)


def write_packed(order: dict[str, Any], packed: dict[str, Table], output: Path) -> Iterator[pyarrow.Table]:
    """Write one shard of one table from the files that its rows stand in."""
    name = order["table"]
    table = pyarrow.concat_tables(packed[name].slices(order["first"], order["last"])).combine_chunks()
    write_shard(output / name / shard_name(order["shard"]), table)
    yield pyarrow.table([[json.dumps({"rows": table.num_rows})]], schema=FACTS_SCHEMA)


def _documents(records: list[Record], settings: Settings) -> Iterator[Document | str]:
    """For each record its tokens, or the reason why there are none."""
    encoder = _encoder(settings.tokenizer)
    # A document ends once, also when its text already ends in the words for it.
    texts = encoder.encode([record.text.removesuffix(encoder.eos) for record in records])
    prompts = encoder.encode([record.prompt for record in records])
    for record, prompt, text in zip(records, prompts, texts, strict=True):
        if record.kind == PREFERENCE:
            raise StageError(
                f"row {record.id} is a preference pair, which tokenize cannot use: connect the corpus to the `pair` stage"
            )
        yield "chat" if record.kind == CHAT else Document.of(encoder, prompt, text)


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


def _lists(values: npt.NDArray[np.int32], counts: npt.NDArray[np.int64]) -> pyarrow.ListArray:
    """A plain list<int32> of these many values each."""
    offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
    return pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(values))
