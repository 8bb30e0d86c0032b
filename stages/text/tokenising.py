"""What tokenize does to documents, on the workers. Apart, because Ray ships these functions to them.

A document is its tokens and one EOS. Prompt and completion are tokenised apart and joined, so that the boundary is exact
whatever the text; loss is taken on completion and EOS. The first token of a document (or of a piece of one that is longer
than a row) has no label, since nothing in the row predicts it: its bytes are counted apart, so that evaluation can charge
them and bits per byte stay exact. Documents are packed in windows of fixed size, which bounds memory and depends on
nothing but the corpus.
"""

import functools
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow

from stages.text.cleaning import FACTS_SCHEMA
from stages.text.corpus import SPLITS, TRAIN, documents
from stages.text.packing import pack, pieces
from stages.text.shards import Table, shard_name, write_shard
from stages.text.tokenizer import Encoder, Int32, train

DOCUMENTS_PER_WINDOW = 2_048
IGNORED = -100
PACKED_SCHEMA = pyarrow.schema(
    [(name, pyarrow.list_(pyarrow.int32())) for name in ("input_ids", "labels", "document_starts")]
)


def train_tokenizer(corpus: Path, vocab_size: int, directory: Path) -> None:
    """On the training split alone: what a tokenizer saw of the validation text would flatter the model."""
    train((part for _, *parts in documents(corpus, TRAIN) for part in parts if part), vocab_size, directory)


@dataclass
class Window:
    """The pieces of one split of a window, and what was counted about them."""

    ids: list[Int32] = field(default_factory=list)
    labelled: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, document: "Document", sequence_length: int) -> None:
        """Cut a document into pieces, take the label from each first token, leave out pieces without any label."""
        self.counts.update(documents=1, prompt_tokens=document.prompt_tokens, prompt_bytes=document.prompt_bytes)
        for start, end in pieces(len(document.ids), sequence_length):
            labelled, sizes = document.answer[start:end].copy(), document.sizes[start:end]
            unscored = int(labelled[0])
            labelled[0] = False
            if not labelled.any():
                self.counts.update(dropped_pieces=1, dropped_tokens=end - start)
                continue
            self.ids.append(document.ids[start:end])
            self.labelled.append(labelled)
            self.counts.update(
                pieces=1,
                tokens=end - start,
                supervised_tokens=int(labelled.sum()),
                supervised_bytes=int(sizes[labelled].sum()),
                first_tokens=unscored,
                unsupervised_bytes=unscored * int(sizes[0]),
            )

    def packed(self, sequence_length: int, pad_id: int) -> pyarrow.Table:
        """The window's rows; what is left of a row is padding, which counts as a document of its own."""
        rows = pack([len(ids) for ids in self.ids], sequence_length)
        inputs = np.full((len(rows), sequence_length), pad_id, np.int32)
        labels = np.full((len(rows), sequence_length), IGNORED, np.int32)
        starts: list[list[int]] = []
        for row, members in enumerate(rows):
            at, begun = 0, []
            for member in members:
                ids, labelled = self.ids[member], self.labelled[member]
                begun.append(at)
                inputs[row, at : at + len(ids)] = ids
                labels[row, at : at + len(ids)][labelled] = ids[labelled]
                at += len(ids)
            starts.append(begun if at == sequence_length else [*begun, at])
        self.counts.update(rows=len(rows))
        columns = [_lists(inputs), _lists(labels), pyarrow.array(starts, PACKED_SCHEMA.field("document_starts").type)]
        return pyarrow.table(columns, schema=PACKED_SCHEMA)


@dataclass(frozen=True)
class Document:
    """Token ids; for each whether it belongs to the answer (text and EOS), and its UTF-8 bytes when it is text of one."""

    ids: Int32
    answer: npt.NDArray[np.bool_]
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


def pack_window(
    order: dict[str, Any], corpus: Table, tokenizer: Path, sequence_length: int, windows: Path
) -> Iterator[pyarrow.Table]:
    """Tokenise the documents of one window and write its packed rows, apart for each split; report the counts."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Ray spreads the windows; threads beneath would only compete
    encoder = _encoder(tokenizer)
    found = {split: Window() for split in SPLITS}
    for part in corpus.slices(order["first"], order["last"]):
        # A document ends once, also when its text already ends in the words for it.
        texts = [text.removesuffix(encoder.eos) for text in part.column("text").to_pylist()]
        prompts = part.column("prompt").to_pylist()
        for split, prompt, text in zip(
            part.column("split").to_pylist(), encoder.encode(prompts), encoder.encode(texts), strict=True
        ):
            found[split].add(Document.of(encoder, prompt, text), sequence_length)
    for split, window in found.items():
        write_shard(windows / split / shard_name(order["window"]), window.packed(sequence_length, encoder.pad_id))
    facts = {split: window.counts for split, window in found.items()}
    yield pyarrow.table([[json.dumps(facts)]], schema=FACTS_SCHEMA)


def write_packed(order: dict[str, Any], windows: dict[str, Table], output: Path) -> Iterator[pyarrow.Table]:
    """Write one shard of one split from the windows that its rows stand in."""
    split = order["split"]
    table = pyarrow.concat_tables(windows[split].slices(order["first"], order["last"])).combine_chunks()
    write_shard(output / split / shard_name(order["shard"]), table)
    yield pyarrow.table([[json.dumps({"rows": table.num_rows})]], schema=FACTS_SCHEMA)


@functools.cache
def _encoder(directory: Path) -> Encoder:
    return Encoder.load(directory)


def _lists(matrix: Int32) -> pyarrow.ListArray:
    """[rows, n] as a plain list<int32>."""
    offsets = np.arange(len(matrix) + 1, dtype=np.int32) * matrix.shape[1]
    return pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(matrix.reshape(-1)))
