"""What counts as the same text, as pure functions. Apart, because the rules decide which rows are duplicates."""

import hashlib
import re
import unicodedata
from dataclasses import replace

from stages.text.record import Record
from stages.text.rewriting import is_nested, rewritten

_CONTROL = {code: None for code in (*range(0x20), 0x7F, 0xFEFF) if chr(code) not in "\t\n"}
_LINE_ENDS = re.compile(r"\r\n?|\u0085|\u2028|\u2029")
_BLANK_LINES = re.compile(r"\n{3,}")


def normalise(text: str) -> str:
    """NFC; line ends as `\\n`; no control characters but tab, no byte-order marks, no white space before a line's end, at
    most one blank line in a row. White space inside a line and before it stays: in code it means something."""
    plain = text.isascii()
    if "\r" in text or not plain:
        text = _LINE_ENDS.sub("\n", text)
    text = text.translate(_CONTROL)
    if not plain:
        text = unicodedata.normalize("NFC", text)  # after the control characters, which keep marks from their letters
    if not plain or " \n" in text or "\t\n" in text:
        *lines, last = text.split("\n")
        text = "\n".join([*map(str.rstrip, lines), last])
    return _BLANK_LINES.sub("\n\n", text) if "\n\n\n" in text else text


def normalise_row(prompt: str, text: str) -> tuple[str, str]:
    """A row's two strings. Where they meet, white space stays, since it tells where an answer begins."""
    text = normalise(text).rstrip()
    return normalise(prompt), text if prompt else text.lstrip("\n")


def content_key(prompt: str, text: str) -> bytes:
    """32 bytes: sha256 over a normalised row. Equal keys are duplicates."""
    digest = hashlib.sha256(f"{len(prompt)}\0".encode())
    digest.update(prompt.encode())
    digest.update(text.encode())
    return digest.digest()


def normal_form(record: Record) -> Record:
    """The row that stands for all that are the same after normalisation. In messages white space around what is said makes
    no difference either."""
    if is_nested(record):
        return rewritten(record, lambda said: normalise(said).strip())
    prompt, text = normalise_row(record.prompt, record.text)
    if prompt == record.prompt and text == record.text:
        return record
    return replace(record, prompt=prompt, text=text)


def key_of(record: Record) -> bytes:
    """Content key: of prompt and text, or of what a chat or a preference consists of."""
    if is_nested(record):
        return content_key(record.messages + "\0" + record.tools, record.chosen + "\0" + record.rejected)
    return content_key(record.prompt, record.text)


def side(key: bytes) -> int:
    """64 bits of a row's content that decide its side of the split; below `fraction * 2**64` is validation."""
    return int.from_bytes(hashlib.sha256(b"split\0" + key).digest()[:8], "big")


def in_validation(key: bytes, fraction: float) -> bool:
    """Which side of the split a row falls on: by its content alone, so that other rows never move it."""
    return side(key) < fraction * 2**64
