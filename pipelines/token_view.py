"""One packed row as a person reads it: the text token by token, under each token whether the model learns to say it. Apart from the
preview, because what a terminal shows of strange text (unfinished characters, escapes, wide letters) is a topic of its own.

Each line of text has a line of marks below it, so that nothing depends on colour: `╰──` under a token that carries loss, `·`
under one that is only read. Nothing of the text reaches the terminal as it is: what would move the cursor is written out.
"""

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.cells import cell_len
from rich.text import Text

IGNORED = -100
LOSS = ("bright_white on dark_green", "bright_white on green4")
"""Two shades in turn, so that neighbours are told apart."""
READ = ("", "dim")
CONTROL, CONTROL_LEARNED = "bold magenta", "bold bright_yellow"
FOLD_RUN = 160
"""A run of tokens with equal marks that is longer is folded in the middle."""
FOLD_LEAST = 40
FOLD_DOCUMENTS = 8

LEGEND = (
    ("╰──", LOSS[0], "carries loss: the model learns to say it"),
    ("·  ", "", "is only read"),
    ("⟦…⟧", CONTROL, "control token (one id, not text)"),
    ("⏎ ⇥", "", "line end, tab"),
    ("‹e6·97›", "", "bytes of a character that several tokens share; the last one shows it: ‹a5→日›"),
)


@dataclass(frozen=True)
class Token:
    """What is shown of one token."""

    text: str
    id: int
    loss: bool
    control: bool = False
    continued: bool = False
    """A further part of the token before it."""

    @property
    def cells(self) -> int:
        return cell_len(self.text)


class Vocabulary:
    """A saved fast tokenizer as far as showing needs it: id -> bytes or control token."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        path = directory / "tokenizer.json"
        said = json.loads(path.read_text("utf-8"))
        self._tokenizer = Tokenizer.from_file(str(path))
        self._added = {entry["id"]: entry for entry in said.get("added_tokens") or []}
        decoder = json.dumps(said.get("decoder"))
        self._byte_of = _byte_alphabet() if '"ByteLevel"' in decoder else None
        self._fallback = '"ByteFallback"' in decoder
        self._space = (
            "▁"
            if "▁"
            in json.dumps([said.get("decoder"), said.get("pre_tokenizer"), said.get("normalizer")], ensure_ascii=False)
            else None
        )

    def control(self, token: int) -> str | None:
        """The name of a control token, or None."""
        added = self._added.get(token)
        return added["content"] if added and added.get("special") else None

    def bytes_of(self, token: int) -> bytes:
        """UTF-8 bytes that a token of text stands for; perhaps a part of a character."""
        if token in self._added:
            return str(self._added[token]["content"]).encode()
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return f"⟨no token {token}⟩".encode()
        if self._byte_of is not None and all(letter in self._byte_of for letter in name):
            return bytes(self._byte_of[letter] for letter in name)
        if self._fallback and (found := re.fullmatch("<0x([0-9A-Fa-f]{2})>", name)):
            return bytes([int(found[1], 16)])
        return name.replace(self._space, " ").encode() if self._space else name.encode()


def _byte_alphabet() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes with (GPT-2): printable ones as they are, the others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def tokens(vocabulary: Vocabulary, ids: Sequence[int], loss: Sequence[bool]) -> Iterator[Token]:
    """What is shown of each token of one document. A character that several tokens share appears in the last of them."""
    pending = b""
    for index, (token, learned) in enumerate(zip(ids, loss, strict=True)):
        name = vocabulary.control(token)
        if name is not None:
            pending = b""
            yield Token(f"⟦{visible(name)}⟧", token, learned, control=True)
            continue
        raw = vocabulary.bytes_of(token)
        following = vocabulary.bytes_of(ids[index + 1]) if index + 1 < len(ids) else b""
        text, pending = _pieces(pending, raw, following)
        yield Token(text or "∅", token, learned)


def _pieces(pending: bytes, raw: bytes, following: bytes) -> tuple[str, bytes]:
    """(what is shown of `raw`, the bytes of a character that is still unfinished after it)."""
    shown, head, at = "", pending, 0
    if pending:  # bytes that go on with the character before
        while at < len(raw) and 0x80 <= raw[at] < 0xC0 and len(head) < _size(head[0]):
            head += raw[at : at + 1]
            at += 1
        if at:
            whole = head.decode("utf-8", "ignore") if len(head) == _size(head[0]) else ""
            shown = f"‹{_hex(raw[:at])}{'→' + visible(whole) if whole else ''}›"
        if at == len(raw) and len(head) < _size(head[0]) and at:
            return shown, head
    rest = raw[at:]
    cut = _unfinished(rest)
    tail = rest[len(rest) - cut :] if cut else b""
    for part in re.split("([\ud800-\udfff]+)", rest[: len(rest) - cut].decode("utf-8", "surrogateescape")):
        broken = bytes(ord(letter) - 0xDC00 for letter in part if 0xD800 <= ord(letter) <= 0xDFFF)
        shown += f"‹{_hex(broken)}›" if broken else visible(part)
    if tail:
        shown += f"‹{_hex(tail)}›"
    goes_on = bool(following) and 0x80 <= following[0] < 0xC0
    return shown, tail if goes_on else b""


def _unfinished(data: bytes) -> int:
    """Bytes at the end of `data` that begin a character and do not end it."""
    for back in range(1, min(3, len(data)) + 1):
        first = data[-back]
        if first >= 0xC2:
            return back if _size(first) > back else 0
        if first < 0x80:
            return 0
    return 0


def _size(first: int) -> int:
    """Bytes of the UTF-8 character that begins with this byte."""
    return 4 if first >= 0xF0 else 3 if first >= 0xE0 else 2


def _hex(data: bytes) -> str:
    return "·".join(f"{byte:02x}" for byte in data)


def visible(text: str) -> str:
    """The text with everything written out that a terminal would obey, hide or turn around."""
    shown = "".join(_letter(letter) for letter in text)
    # An accent belongs to the letter before it, which is another token's.
    return f"◌{shown}" if text and unicodedata.category(text[0]) in ("Mn", "Me", "Mc") else shown


def _letter(letter: str) -> str:
    if letter == "\n":
        return "⏎"
    if letter == "\t":
        return "⇥"
    code = ord(letter)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    category = unicodedata.category(letter)
    if category in ("Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp") or (category == "Zs" and letter != " "):
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return letter


@dataclass(frozen=True)
class Fold:
    """Tokens that are not shown."""

    words: str


def folded(shown: Sequence[Token], whole: bool) -> Iterator[Token | Fold]:
    """Runs of equal marks, the middle of long ones left out, so that every change of the mask is seen."""
    start = 0
    for end in range(1, len(shown) + 1):
        if end < len(shown) and shown[end].loss == shown[start].loss:
            continue
        run = shown[start:end]
        if whole or len(run) < FOLD_RUN + FOLD_LEAST:
            yield from run
        else:
            head, tail = FOLD_RUN * 3 // 4, FOLD_RUN // 4
            yield from run[:head]
            what = "with loss" if run[0].loss else "only read"
            yield Fold(f"… {len(run) - head - tail:,} tokens {what}, folded …")
            yield from run[-tail:]
        start = end


def lines(items: Sequence[Token | Fold], width: int, ids: bool = False) -> Iterator[Text]:
    """The text, wrapped to `width` cells, each line with its line of marks below it (and one of ids)."""
    row: list[Token] = []
    used = 0
    for item in items:
        if isinstance(item, Fold):
            yield from _line(row, ids)
            row, used = [], 0
            yield Text(item.words, "dim italic")
            continue
        for part in _parts(item, width):
            wide = _cell_width(part, ids)
            ended = bool(row) and row[-1].text.endswith("⏎") and not part.text.startswith("⏎")
            if row and (ended or used + wide > width):
                yield from _line(row, ids)
                row, used = [], 0
            row.append(part)
            used += wide
    yield from _line(row, ids)


def _parts(token: Token, width: int) -> Iterator[Token]:
    """The token; in parts where a line ends in it, or where it is wider than a line."""
    part, continued = "", False
    for letter in token.text:
        if part and (cell_len(part + letter) > width or (part[-1] == "⏎" and letter != "⏎")):
            yield replace(token, text=part, continued=continued)
            part, continued = "", True
        part += letter
    yield replace(token, text=part, continued=continued)


def _cell_width(token: Token, ids: bool) -> int:
    return max(token.cells, len(str(token.id)) + 1) if ids else token.cells


def _line(row: Sequence[Token], ids: bool) -> Iterator[Text]:
    if not row:
        return
    text, marks, numbers = Text(), Text(), Text()
    for place, token in enumerate(row):
        wide = _cell_width(token, ids)
        style = (LOSS if token.loss else READ)[place % 2]
        if token.control:
            style = f"{style} {CONTROL_LEARNED}" if token.loss else CONTROL
        text.append(token.text + " " * (wide - token.cells), style)
        first, more = ("╰", "─") if token.loss else ("·", " ")
        marks.append((more if token.continued else first) + more * (wide - 1), "green" if token.loss else "dim")
        numbers.append(("" if token.continued else str(token.id)).ljust(wide), "cyan")
    yield text
    yield marks
    if ids:
        yield numbers
