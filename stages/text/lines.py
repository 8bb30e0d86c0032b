"""Lines of a file, decompressed as they come and never more than one in memory. Apart, because every way in which the bytes
themselves are broken (cut off, wrong encoding, no line ends at all) is dealt with here.
"""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

import pyarrow

from stages.contract import StageError
from stages.storage.bucket import BucketError
from stages.text.files import File
from stages.text.opening import opened

SKIP = 2**20
MARK = b"\xef\xbb\xbf"
OTHER = {
    b"\x1f\x8b": "gzip data; name it .gz",
    b"\x28\xb5\x2f\xfd": "zstd data; name it .zst",
    b"PK\x03\x04": "a zip archive (or an office document); unpack it",
    b"PAR1": "a Parquet file; name it .parquet",
    b"BZh": "bzip2 data; compress it again as .gz or .zst",
    b"\xfd7zXZ": "xz data; compress it again as .gz or .zst",
    b"%PDF": "a PDF; extract its text",
    b"version https://git-lfs": "a pointer of Git LFS and not the file itself; run git lfs pull",
    b"ARROW1": "an Arrow file; write it again as Parquet",
}
Line = bytes | None
"""None: a line that is longer than allowed; its bytes were skipped."""


def numbered(
    file: File, max_bytes: int, start: int = 0, end: int | None = None, passed: Callable[[bytes], None] | None = None
) -> Iterator[tuple[int, Line]]:
    """(number from 1, line with its end) of the lines that begin in `start` .. `end` - 1 of an uncompressed file (of all).
    `passed` is given the pieces of a line that is longer than allowed."""
    with whole(file), stream(file, max(start - 1, 0)) as source:
        if start == 0:
            source = _without_mark(file, source)
        else:
            _skip_line(source, end)
        at = source.tell() if end is not None else 0
        number = 0
        while end is None or at < end:
            line = source.readline(max_bytes + 1)
            if not line:
                return
            number += 1
            at += len(line)
            if len(line) > max_bytes and not line.endswith(b"\n"):
                if passed is not None:
                    passed(line)
                at += _skip_line(source, passed=passed)
                yield number, None
            else:
                yield number, line


def line_starts(file: File, start: int, end: int) -> int:
    """How many lines begin in `start` .. `end` - 1 of an uncompressed file."""
    found = int(start == 0)
    with opened(file, max(start - 1, 0)) as source:
        left = end - 1 - max(start - 1, 0)
        while left > 0 and (block := source.read(min(left, SKIP))):
            found += block.count(b"\n")
            left -= len(block)
    return found


def stream(file: File, start: int = 0) -> IO[bytes]:
    """The file's content, decompressed."""
    if file.compression and not file.bytes:  # even of nothing there would be a head
        raise StageError(f"{file.name}: truncated at byte 0, it is empty; copy or compress it again")
    raw = opened(file, start)
    if file.compression == "gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if file.compression == "zst":  # Arrow's own codec: it streams, reads many frames and notices a cut
        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), SKIP)
    return raw


@contextmanager
def whole(file: File) -> Iterator[None]:
    """Whatever a cut-off or unreadable file makes its reader raise becomes one sentence."""
    again = "copy or compress it again"
    try:
        yield
    except BucketError:
        raise
    except EOFError:
        raise StageError(
            f"{file.name}: truncated at byte {file.bytes}, its gzip stream ends too early; {again}"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise StageError(f"{file.name}: not a whole gzip file ({error}); {again}") from None
    except OSError as error:
        if "Truncated" in str(error):
            raise StageError(
                f"{file.name}: truncated at byte {file.bytes}, its zstd stream ends too early; {again}"
            ) from None
        if "ZSTD" in str(error):
            raise StageError(f"{file.name}: not a whole zstd file ({str(error)[:80]}); {again}") from None
        raise StageError(f"{file.name}: cannot be read ({error.strerror or error})") from None


def _skip_line(source: IO[bytes], end: int | None = None, passed: Callable[[bytes], None] | None = None) -> int:
    """Read up to and with the next line end, a little at a time; not much further than `end`."""
    skipped = 0
    while (end is None or source.tell() < end) and (piece := source.readline(SKIP)):
        skipped += len(piece)
        if passed is not None:
            passed(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def refuse_other(file: File, head: bytes) -> None:
    """For what begins as some other kind of file does."""
    for magic, what in OTHER.items():
        if head.startswith(magic):
            raise StageError(f"{file.name}: is {what}")


def _without_mark(file: File, source: IO[bytes]) -> IO[bytes]:
    """A UTF-8 byte-order mark is dropped; UTF-16 and what is no text at all is refused."""
    head: bytes = source.peek(32)  # type: ignore[attr-defined]  # BufferedReader and GzipFile both have it
    refuse_other(file, head)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in head[:4]:
        raise StageError(f"{file.name}: is UTF-16 or UTF-32, wanted UTF-8; save it as UTF-8")
    if head.startswith(MARK):
        source.read(len(MARK))
    return source
