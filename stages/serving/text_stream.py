"""Token ids to text that can be sent at once, and to the bytes that each stands for. Apart, because two traps live here: characters
and stop strings that are split over tokens. Streamed and whole answers both take this path, so that they are equal."""

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

REPLACEMENT = "\ufffd"
CONTEXT = 6
"""Prompt tokens decoded before the answer, so that a decoder which strips a leading space strips the prompt's."""


class TextStream:
    """Feed ids with `push`; it returns text that is certain: no half character, no beginning of a stop string.

    Not tokenizers' DecodeStream: primed with a prompt that ends inside a character, its first chunk repeats the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-CONTEXT:])
        self._start = 0
        self._read = len(self._ids)
        while self._read > 0 and self._decode(self._ids[: self._read]).endswith(REPLACEMENT):
            self._read -= 1  # the prompt ends inside a character: its bytes belong to the answer
        self._stop = stop
        self._held = ""
        self.stopped = False
        """A stop string was completed; the answer ends before it."""

    def push(self, token: int) -> str:
        """Text that `token` made certain (often one token's, sometimes none)."""
        assert not self.stopped, "the answer has ended"
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._read])
        now = self._decode(self._ids[self._start :])
        if len(now) <= len(before) or now.endswith(REPLACEMENT):
            return ""  # the end may be the first bytes of a character
        self._start, self._read = self._read, len(self._ids)
        return self._release(now[len(before) :])

    def flush(self) -> str:
        """The held text when no stop string ended the answer. Bytes of an unfinished character are dropped."""
        held, self._held = self._held, ""
        return held

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def _release(self, text: str) -> str:
        buffer = self._held + text
        completed = [(at + len(stop), at) for stop in self._stop if (at := buffer.find(stop)) >= 0]
        if completed:  # the stop string that is complete first wins; of two that end together, the longer
            self.stopped = True
            self._held = ""
            return buffer[: min(completed)[1]]
        hold = max((_overlap(buffer, stop) for stop in self._stop), default=0)
        self._held = buffer[len(buffer) - hold :]
        return buffer[: len(buffer) - hold]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def piece_reader(tokenizer: Any) -> Callable[[int], bytes]:
    """A function from a token's id to its bytes of the text, which may be a part of a character; of a special token none, since
    its text never appears."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    added = tokenizer.added_tokens_decoder
    letters = _byte_letters() if _is_byte_level(backend) else None

    @functools.lru_cache(maxsize=65_536)
    def piece(token: int) -> bytes:
        if token in added:
            return b"" if added[token].special else str(added[token].content).encode()
        written = backend.id_to_token(token)
        if written is None:  # a row of the embedding that no token stands for
            return b""
        if letters is not None and all(letter in letters for letter in written):
            return bytes(letters[letter] for letter in written)
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", written):
            return bytes([int(byte[1], 16)])
        return str(backend.decode([token], skip_special_tokens=True) or written.replace("\u2581", " ")).encode()

    return piece


def _is_byte_level(backend: Tokenizer) -> bool:
    def kinds(part: Any) -> list[str]:
        return [part["type"], *(kind for inner in part.get("decoders", ()) for kind in kinds(inner))]

    decoder = backend.decoder
    return decoder is not None and "ByteLevel" in kinds(json.loads(decoder.__getstate__()))


def _byte_letters() -> dict[str, int]:
    """Letter of the byte-level alphabet -> its byte: printable bytes stand for themselves, the others follow from 256 on."""
    alphabet = set(ByteLevel.alphabet())
    own = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return own | {chr(256 + number): byte for number, byte in enumerate(others)}
