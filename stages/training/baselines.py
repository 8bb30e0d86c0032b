"""What a language model is measured against, on the same bytes: the frequencies of single tokens, and a compressor that
has read the training text. Apart, because they are plain counting and need no model."""

import lzma
import math
from collections.abc import Iterable

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


def primed_lzma_bytes(train: Iterable[str], validation: Iterable[str], limit: int) -> tuple[int, int]:
    """(bytes that the validation text adds to the compressed training text, bytes of training text that were read).

    Training text beyond `limit` bytes is left out, from its end. The dictionary holds everything that was read.
    """
    primer = _joined(train)[:limit]
    text = _joined(validation)
    return _compressed(primer + text) - _compressed(primer), len(primer)


def _joined(documents: Iterable[str]) -> bytes:
    return b"".join(document.encode() + SEPARATOR for document in documents)


def _compressed(data: bytes) -> int:
    size = 1 << max(16, math.ceil(math.log2(len(data) + 1)))
    preset = 9 | lzma.PRESET_EXTREME
    filters = [{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": min(size, 1536 << 20)}]
    return len(lzma.compress(data, format=lzma.FORMAT_RAW, filters=filters))
