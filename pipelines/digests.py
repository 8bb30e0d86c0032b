"""Content digests, each file hashed once. Apart from the store, because sources outside it are digested by the same memo."""

import hashlib
import json
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from stages.storage.hashing import sha256_file, tree_digest

GRAIN_NS = 2_000_000_000
"""A file changed less than two seconds ago may change again within the clock's grain: its mtime is not trusted yet."""


class Digests:
    """sha256 of files, memoised by path, size, mtime and inode in one JSON file. Safe to share between threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memo: dict[str, list[Any]] | None = None
        self._fresh: dict[str, list[Any]] = {}
        self._lock = threading.Lock()

    def path(self, path: Path) -> str:
        """Digest of a file, or of a directory's tree (names and bytes)."""
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
            return tree_digest({p.relative_to(path).as_posix(): self.file(p) for p in files})
        return self.file(path)

    def file(self, path: Path, *, trusted: bool = True) -> str:
        """Digest of a file; read only when the memo does not know this size, mtime and inode, or when it is not `trusted`."""
        status = path.stat()
        stamp = [status.st_size, status.st_mtime_ns, status.st_ino]
        known = self._loaded().get(str(path))
        if trusted and known is not None and known[:3] == stamp:
            return str(known[3])
        found = sha256_file(path)
        if time.time_ns() - status.st_mtime_ns > GRAIN_NS:
            self._keep(path, [*stamp, found])
        return found

    def note(self, path: Path, sha256: str) -> None:
        """Remember a digest that the caller has just computed from bytes that nobody changes any more."""
        status = path.stat()
        self._keep(path, [status.st_size, status.st_mtime_ns, status.st_ino, sha256])

    def tagged(self, uri: str) -> tuple[str, str] | None:
        """(entity tag, sha256) of a blob in an object store when this machine last hashed it; None when it never did."""
        known = self._loaded().get(uri)
        return (str(known[0]), str(known[1])) if known else None

    def note_tagged(self, uri: str, tag: str, sha256: str) -> None:
        self._keep(uri, [tag, sha256])

    def save(self) -> None:
        """Write what this process learned, joined with what others wrote meanwhile."""
        with self._lock:
            if not self._fresh or not self._path.parent.is_dir():
                return
            self._memo = {**self._read(), **self._fresh}
            temporary = self._path.with_name(f".{self._path.name}.{uuid.uuid4().hex[:8]}")
            temporary.write_text(json.dumps(self._memo), "utf-8")
            temporary.replace(self._path)
            self._fresh = {}

    def _keep(self, path: Path | str, entry: list[Any]) -> None:
        with self._lock:
            self._fresh[str(path)] = entry
            if self._memo is not None:
                self._memo[str(path)] = entry

    def _loaded(self) -> dict[str, list[Any]]:
        with self._lock:
            if self._memo is None:
                self._memo = {**self._read(), **self._fresh}
            return self._memo

    def _read(self) -> dict[str, list[Any]]:
        try:
            return dict(json.loads(self._path.read_text("utf-8")))
        except (OSError, ValueError):
            return {}


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
