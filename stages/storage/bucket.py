"""Where published bytes live: a directory or an object store (s3://, gs://, az://), behind the same few operations. Apart, because
the orchestrator publishes through it and stages read artifacts through it, on any node.

All promises about publication rest on `create` (create-if-absent) alone; `probe` shows whether a backend keeps it. Credentials and
endpoints of object stores come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...), as for every other tool.
"""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

TRANSFERS = 8
"""Files that go up or down at the same time."""
PATIENCE_S = 300.0
"""For one request, body included: 64 MB at 0.2 MB/s."""
PIECE = 64 * 2**20
"""Bytes that one request reads: what is larger is read in ranges, each of which may be tried again."""
PARTS = 9_000
"""An object store takes at most 10,000 parts of an upload."""
PROBES = 8
METADATA = "169.254.169.254"
SCHEMES = ("file", "s3", "gs", "az")


class BucketError(OSError):
    """The backend refuses or cannot be reached. The message names the place and what it said, in one line."""


class BlobMissing(BucketError):
    """The backend answers, and has no such blob."""


@dataclass(frozen=True)
class Entry:
    """One stored blob."""

    key: str
    bytes: int
    tag: str
    """Changes when the content does: the backend's entity tag."""
    modified: float
    """Unix time in seconds, by the backend's clock."""


class Bucket:
    """Blobs by key (`a/b/c.json`) below one URI."""

    def __init__(self, uri: str, *, single_writer: bool = False, patience_s: float = PATIENCE_S) -> None:
        """`single_writer`: the caller vouches that nobody else writes, so `create` may look before it writes. `patience_s`: how
        long one request may take; it is tried again for three times as long."""
        self.uri = uri.rstrip("/")
        self.single_writer = single_writer
        self.directory = local_path(uri)
        """The directory, when the bucket is one."""
        scheme = urlparse(uri).scheme
        if scheme not in SCHEMES:
            raise ValueError(f"{uri}: want a directory or one of {', '.join(f'{s}://' for s in SCHEMES[1:])}")
        self._opened: Any = None
        if self.directory is not None:
            return
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        self._opened = from_url(
            self.uri,
            # Plain http only where the user's own endpoint says so.
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": "5s",
                "timeout": timedelta(seconds=patience_s),
            },
            retry_config={"max_retries": 6, "retry_timeout": timedelta(seconds=3 * patience_s)},
        )

    @property
    def _store(self) -> Any:
        """The backend. A directory is opened when it is there: reading from one that is not finds nothing and makes nothing."""
        if self._opened is None and self.directory is not None:
            if not self.directory.is_dir():
                raise FileNotFoundError(self.directory)
            self._opened = from_url(self.directory.as_uri())
        return self._opened

    def prepare(self) -> None:
        """Make the directory, when the bucket is one."""
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)

    def impatient(self, patience_s: float) -> "Bucket":
        """The same blobs for whoever must not wait long for one request."""
        if self.directory is not None:
            return self
        return Bucket(self.uri, single_writer=self.single_writer, patience_s=patience_s)

    def get(self, key: str) -> bytes | None:
        """The blob, or None when there is none."""
        try:
            return bytes(obstore.get(self._store, key).bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (BaseError, OSError) as error:
            raise self._error("read", key, error) from error

    def put(self, key: str, data: bytes) -> None:
        """Write or replace the blob, whole or not at all."""
        self.prepare()
        try:
            obstore.put(self._store, key, data)
        except (BaseError, OSError) as error:
            raise self._error("write", key, error) from error
        self._sync(key)

    def create(self, key: str, data: bytes) -> bool:
        """Write the blob if there is none; True when it is ours. Of any number of callers exactly one gets True.

        The data must differ between callers (carry a nonce): a retried request whose first answer was lost is told apart by it.
        """
        if self.single_writer:
            if (found := self.get(key)) is not None:
                return found == data
            self.put(key, data)
            return True
        self.prepare()
        try:
            obstore.put(self._store, key, data, mode="create")
        except AlreadyExistsError:
            return self.get(key) == data
        except (BaseError, OSError) as error:
            raise self._error("create", key, error) from error
        self._sync(key)
        return True

    def entries(self, prefix: str) -> list[Entry]:
        """All blobs below `prefix/`, sorted by key; [] when there are none."""
        try:
            found = obstore.list(self._store, prefix or None).collect()
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (BaseError, OSError) as error:
            raise self._error("list", prefix, error) from error
        entries = [Entry(m["path"], m["size"], m["e_tag"] or "", m["last_modified"].timestamp()) for m in found]
        return sorted(entries, key=lambda entry: entry.key)

    def children(self, prefix: str) -> list[str]:
        """Names directly below `prefix/`, sorted."""
        try:
            found = obstore.list_with_delimiter(self._store, prefix or None)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (BaseError, OSError) as error:
            raise self._error("list", prefix, error) from error
        paths = [*found["common_prefixes"], *(m["path"] for m in found["objects"])]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove blobs; those that are gone already do not matter."""
        try:
            for key in keys:
                try:
                    obstore.delete(self._store, key)
                except FileNotFoundError:
                    continue
                self._remove_empty(key)
        except (BaseError, OSError) as error:
            raise self._error("delete", "", error) from error

    def move(self, prefix: str, to: str) -> None:
        """Move every blob below `prefix/` (not atomic: nobody may rely on either place meanwhile)."""
        for entry in self.entries(prefix):
            try:
                obstore.rename(self._store, entry.key, f"{to}/{entry.key.removeprefix(prefix).lstrip('/')}")
            except (BaseError, OSError) as error:
                raise self._error("move", entry.key, error) from error
            self._remove_empty(entry.key)

    def upload(self, directory: Path, names: Iterable[str], prefix: str) -> None:
        """Store files of a directory under `prefix/<name>`, several at once; large ones in parts."""
        self.prepare()

        def one(name: str) -> None:
            path = directory / name
            part = max(8 * 2**20, -(-path.stat().st_size // PARTS))
            try:
                obstore.put(self._store, f"{prefix}/{name}", path, chunk_size=part)
            except (BaseError, OSError) as error:
                raise self._error("write", f"{prefix}/{name}", error) from error

        with ThreadPoolExecutor(TRANSFERS) as pool:
            list(pool.map(one, names))

    def download(self, key: str, to: Path) -> None:
        """Write a blob to a file, a few MB in memory at a time."""
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            with to.open("wb") as file:
                for chunk in self.chunks(key):
                    file.write(chunk)
        except BucketError:
            raise
        except OSError as error:
            raise self._error("read", key, error) from error

    def chunks(self, key: str) -> Iterator[Any]:
        """A blob's bytes in pieces of a few MB, each with the buffer interface."""
        try:
            size = obstore.head(self._store, key)["size"]
            if size <= PIECE:
                yield from obstore.get(self._store, key).stream(min_chunk_size=4 * 2**20)
                return
            for start in range(0, size, PIECE):
                yield obstore.get_range(self._store, key, start=start, end=min(start + PIECE, size))
        except (BaseError, OSError) as error:
            raise self._error("read", key, error) from error

    def entry(self, key: str) -> Entry | None:
        """What is known about one blob, or None when there is none."""
        try:
            m = obstore.head(self._store, key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (BaseError, OSError) as error:
            raise self._error("read", key, error) from error
        return Entry(m["path"], m["size"], m["e_tag"] or "", m["last_modified"].timestamp())

    def read(self, key: str, start: int, end: int) -> bytes:
        """A blob's bytes from `start` up to `end`, which must not lie behind its end."""
        try:
            return bytes(obstore.get_range(self._store, key, start=start, end=end))
        except (BaseError, OSError) as error:
            raise self._error("read", key, error) from error

    def probe(self) -> str | None:
        """None when the backend keeps create-if-absent, else what it did instead. Writes and removes one small blob."""
        key = f".probe-{uuid.uuid4().hex}"
        try:
            with ThreadPoolExecutor(PROBES) as pool:
                mine = list(pool.map(lambda n: self.create(key, str(n).encode()), range(PROBES)))
            if sum(mine) != 1:
                return f"{sum(mine)} of {PROBES} writers of one key were told that it is theirs"
            kept = self.get(key)
            if kept is None or not mine[int(kept)]:
                return "a later writer replaced the first one's bytes"
            if self.create(key, b"late"):
                return "a second create of one key replaced the first"
        finally:
            self.delete([key])
        return None

    def _error(self, what: str, key: str, error: Exception) -> BucketError:
        said = str(error).partition("\n")[0]
        number = re.search(r"\(os error (\d+)\)", str(error))  # the backend's errors carry no errno of their own
        full = number is not None and int(number[1]) in (errno.ENOSPC, errno.EDQUOT) and self.directory is not None
        room = (
            f"; {free_mb(self.directory)} MB free: free some (make gc) and run again" if full and self.directory else ""
        )
        if METADATA in said:  # where a cloud's own machines get theirs; the library asks there when it has none
            said = "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run where the cloud gives them"
        kind = BlobMissing if isinstance(error, FileNotFoundError) else BucketError
        raised = kind(f"{self.uri}/{key}: cannot {what} ({said}){room}")
        raised.errno = int(number[1]) if number else None
        return raised

    def _sync(self, key: str) -> None:
        """A directory's blobs reach the disk before anybody is told that they exist."""
        if self.directory is not None:
            path = self.directory / key
            fsync(path)
            fsync(path.parent)

    def _remove_empty(self, key: str) -> None:
        """Leave no empty directories behind, which an object store has not either."""
        if self.directory is None:
            return
        for parent in (self.directory / key).parents:
            if parent == self.directory:
                break
            try:
                parent.rmdir()
            except OSError:
                break


def local_path(uri: str) -> Path | None:
    """The path of a file:// URI, else None."""
    parsed = urlparse(uri)
    return Path(unquote(parsed.path)) if parsed.scheme == "file" else None


def fsync(path: Path) -> None:
    """Have the kernel write a file or a directory's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_mb(path: Path) -> int:
    """Free space of the file system that holds `path`, in MiB."""
    return shutil.disk_usage(path).free // 2**20
