"""Lines of a CSV file as `csv` takes them. Apart from its rows: a line that is too long to be kept still decides, by its quotes, which
of the lines behind it belong to its row.
"""

from codecs import getincrementaldecoder
from enum import Enum

from stages.text.files import File
from stages.text.lines import numbered


class CsvLines:
    """Text, line by line; `csv` takes a row's further lines by itself."""

    def __init__(self, file: File, max_bytes: int, delimiter: str) -> None:
        self._quotes = _Quotes(delimiter)
        self._lines = numbered(file, max_bytes, passed=self._quotes.follow)
        self._start = 1
        self.number, self.line = 0, ""
        self.too_long = False
        """A line of this row is."""

    def begin(self) -> int:
        """A new row, and the line that it begins in."""
        self._start, self.too_long = self.number + 1, False
        return self._start

    def __iter__(self) -> "CsvLines":
        return self

    def __next__(self) -> str:
        within = self.number >= self._start  # a row goes on in another line only within quotes
        self._quotes.begin(within)
        self.number, line = next(self._lines)
        if line is None:  # a line in its place that leaves quotes as it does
            self.too_long = True
            self.line = "\n" if within == self._quotes.open else '"\n'
        else:
            self.line = line.decode("utf-8", "surrogateescape")
        return self.line


class _State(Enum):
    fresh = "a value begins"
    plain = "within a value without quotes, in which a quote is a sign as any other"
    quoted = "within quotes"
    closing = "behind a quote that ends them, unless another follows"


class _Quotes:
    """Whether quotes are open behind a line that comes in pieces, as `csv` has it."""

    def __init__(self, delimiter: str) -> None:
        self._delimiter = delimiter
        self.begin(within=False)

    def begin(self, within: bool) -> None:
        self._decoder = getincrementaldecoder("utf-8")("surrogateescape")  # a delimiter may be cut by a piece's end
        self._state = _State.quoted if within else _State.fresh

    @property
    def open(self) -> bool:
        return self._state is _State.quoted

    def follow(self, piece: bytes) -> None:
        text, at = self._decoder.decode(piece), 0
        while at < len(text):
            if self._state is _State.quoted:
                sign, behind = '"', _State.closing
            elif text[at] == '"' and self._state is not _State.plain:
                sign, behind = '"', _State.quoted
            else:
                sign, behind = self._delimiter, _State.fresh
            at = text.find(sign, at) + 1
            if not at:
                self._state = self._state if self.open else _State.plain
                return
            self._state = behind
