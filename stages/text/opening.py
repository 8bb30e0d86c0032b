"""The bytes of a file, on a disk or in an object store, as one stream. Apart from finding files: workers open what was found."""

import io
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from stages.storage.bucket import Bucket
    from stages.text.files import File

READ_AHEAD = 8 * 2**20
"""Bytes that one request to an object store asks for."""


def opened(file: "File", start: int = 0) -> IO[bytes]:
    """The file's own bytes from `start` on, seekable, little in memory at a time."""
    if not file.key:
        stream = Path(file.where).open("rb", buffering=2**20)  # noqa: SIM115  the caller closes it
        stream.seek(start)
        return stream
    from stages.storage.bucket import Bucket

    blob: io.RawIOBase = _Blob(Bucket(file.where), file.key, file.bytes)
    reader = io.BufferedReader(blob, READ_AHEAD)
    reader.seek(start)
    return reader


class _Blob(io.RawIOBase):
    """A blob of an object store as a file; each read is one ranged request."""

    def __init__(self, bucket: "Bucket", key: str, size: int) -> None:
        self.bucket, self.key, self.size, self.position = bucket, key, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        self.position = base + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        end = min(self.position + len(buffer), self.size)
        if end <= self.position:
            return 0
        data = self.bucket.read(self.key, self.position, end)
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)
