"""A document in tokens, and the pieces of it that rows can hold, kept in files until they are packed. Apart from the tasks
that make and read them, because here is decided what is learned and what is left out.

The first token of a piece has no label, since nothing in its row predicts it: when it is text to learn, its bytes are
counted apart, so that evaluation can charge them and bits per byte stay exact.
"""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stages.text.choices import OverLong
from stages.text.packing import Int32, fitted
from stages.text.tokenizer import Encoder

if TYPE_CHECKING:
    from stages.text.templates import Encoded

LENGTH = "log2 "
"""Before a power of two, in counts: `log2 n` counts documents of 2^(n-1) to 2^n - 1 tokens, before they are cut."""
TOKENS_PER_CHUNK = 1 << 20
"""A file of pieces ends here, so that a window of books takes no more memory than one of sentences."""


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

    @classmethod
    def of_chat(cls, encoded: "Encoded") -> "Document":
        """As the template has it; what is not to be learned counts as prompt. Turns end with tokens of the template's."""
        given = ~encoded.labelled
        return cls(encoded.ids, encoded.labelled, encoded.sizes, int(given.sum()), int(encoded.sizes[given].sum()))


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
        counts.update(truncated_documents=int(cut > 0), truncated_tokens=cut, split_documents=int(len(spans) > 1))
        counts.update(documents=1, prompt_tokens=document.prompt_tokens, prompt_bytes=document.prompt_bytes)
        counts[f"{LENGTH}{len(document.ids).bit_length()}"] += 1
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


def groups(chunks: list[dict[str, Any]], tokens: int) -> list[list[dict[str, Any]]]:
    """Neighbouring chunks that have at least so many tokens together; a rest with fewer joins the group before it."""
    found: list[list[dict[str, Any]]] = []
    size = tokens
    for chunk in chunks:
        if size >= tokens:
            found.append([])
            size = 0
        found[-1].append(chunk)
        size += chunk["tokens"]
    if len(found) > 1 and size < tokens:
        rest = found.pop()
        found[-1] += rest
    return found
