"""What a language model is measured against, on the same bytes: the frequencies of single tokens, and a compressor that
has read the training text. Apart, because they are plain counting and need no model."""

import lzma
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stages.text.packed import PackedSplit
from stages.training.loss import IGNORED

SEPARATOR = b"\x00"
"""Between documents, where the model pays for its end-of-sequence token."""


def predicted_tokens(split: PackedSplit) -> npt.NDArray[np.int64]:
    """The ids that the loss is taken on, over the whole split."""
    labels = split.labels[:, 1:]
    return labels[labels != IGNORED].astype(np.int64)


def unigram_nats(train: PackedSplit, validation: PackedSplit, vocab_size: int) -> float:
    """Summed cross entropy of the validation tokens under the frequencies of the training tokens, one added to each."""
    counts = np.bincount(predicted_tokens(train), minlength=vocab_size) + 1.0
    log_probabilities = np.log(counts / counts.sum())
    return float(-log_probabilities[predicted_tokens(validation)].sum())


@dataclass(frozen=True)
class Compressed:
    """What a compressor made of a text after it had read another."""

    added: int
    """Bytes that the text adds to the compressed primer."""
    text: int
    """UTF-8 bytes of the text."""
    primer: int
    """Bytes of training text that were read."""


def primed_lzma_bytes(train: Iterable[str], validation: Iterable[str], limit: int) -> Compressed:
    """Compress the training text with and without the validation text behind it.

    Training text beyond `limit` bytes is left out, from its end. The dictionary holds everything that was read.
    """
    primer = _joined(train)[:limit]
    documents = [document.encode() + SEPARATOR for document in validation]
    text = b"".join(documents)
    return Compressed(_compressed(primer + text) - _compressed(primer), len(text) - len(documents), len(primer))


def _joined(documents: Iterable[str]) -> bytes:
    return b"".join(document.encode() + SEPARATOR for document in documents)


def _compressed(data: bytes) -> int:
    size = 1 << max(16, math.ceil(math.log2(len(data) + 1)))
    preset = 9 | lzma.PRESET_EXTREME
    filters = [{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": min(size, 1536 << 20)}]
    return len(lzma.compress(data, format=lzma.FORMAT_RAW, filters=filters))
