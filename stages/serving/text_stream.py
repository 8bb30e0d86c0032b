"""Token ids to text that can be sent at once. Apart, because two traps live here: characters and stop strings that are
split over tokens. Streamed and whole answers both take this path, so that they are equal."""

from collections.abc import Sequence

from tokenizers import Tokenizer

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
