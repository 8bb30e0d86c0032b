"""The content-addressed store: what is published, and how it becomes so. Apart, because nothing else writes below its root.

    objects/<digest>/          a published artifact: its files, and MANIFEST last; immutable
    records/<fingerprint>.json which object a recipe gave, with the payload, timings and versions of its making
    history/<pipeline>/<stage>.json   the last payload of each stage, for `make why`
    staging/ work/ quarantine/ leases/

The commit point is one rename of a record. "Directory not empty" is never "complete": readers follow records only, and a
record whose object does not verify is set aside with a warning and made again.
"""

import hashlib
import json
import os
import shutil
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pipelines.lease import Lease

MANIFEST = "MANIFEST.json"


class IntegrityError(Exception):
    """Published bytes are not what their record says. Names the file."""


@dataclass(frozen=True)
class Record:
    """A published result: what `records/<fingerprint>.json` holds."""

    fingerprint: str
    digest: str
    payload: dict[str, Any]
    meta: dict[str, Any]
    """run_id, started_at, seconds, bytes, metrics, headline, git, versions, fence."""


class Store:
    """Publishes attempts and finds what was published."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._memo_path = root / "digests.json"
        self._memo: dict[str, list[Any]] | None = None
        self._memo_changed = False

    def prepare(self) -> None:
        """Create the directories; OSError when the root cannot be written."""
        for name in ("objects", "records", "history", "staging", "work", "quarantine", "leases"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        probe = self.root / "staging" / f".probe-{uuid.uuid4().hex}"
        probe.write_text("writable")
        probe.unlink()

    def object(self, digest: str) -> Path:
        return self.root / "objects" / digest

    def work(self, fingerprint: str) -> Path:
        return self.root / "work" / fingerprint

    # Finding

    def find(self, fingerprint: str) -> tuple[Record | None, str | None]:
        """(verified record, None), (None, None) when there is none, or (None, what is wrong with it)."""
        path = self._record_path(fingerprint)
        try:
            data = json.loads(path.read_text("utf-8"))
            record = Record(fingerprint=fingerprint, **{k: data[k] for k in ("digest", "payload", "meta")})
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return None, f"{path}: unreadable record ({error})"
        try:
            self.verify(record.digest)
        except IntegrityError as error:
            return None, str(error)
        return record, None

    def verify(self, digest: str, *, deep: bool = False) -> None:
        """Raise IntegrityError unless every file of the object is there with its size; weights and `deep` are hashed too."""
        directory = self.object(digest)
        try:
            manifest = json.loads((directory / MANIFEST).read_text("utf-8"))
            listed = {
                str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"{directory / MANIFEST}: unreadable manifest ({type(error).__name__})") from error
        for name, (bytes_listed, sha256) in listed.items():
            path = directory / name
            try:
                size = path.stat().st_size
            except OSError:
                raise IntegrityError(f"{path}: the file is gone") from None
            if size != bytes_listed:
                raise IntegrityError(f"{path}: {size} bytes, its manifest says {bytes_listed}")
            # Weights and summaries decide what is served: they are hashed on every hit, once per inode, size and mtime.
            hashed = deep or name.endswith((".safetensors", "summary.json", "golden.json"))
            if hashed and self.file_digest(path, trust_memo=not deep) != sha256:
                raise IntegrityError(f"{path}: its bytes changed since it was published")
        if tree_digest({name: sha256 for name, (_, sha256) in listed.items()}) != digest:
            raise IntegrityError(f"{directory / MANIFEST}: does not belong to object {digest[:12]}")

    def set_aside(self, fingerprint: str) -> Path:
        """Move a broken record, and its object when that is what is broken, to quarantine/. Returns the new place."""
        place = self.root / "quarantine" / f"{fingerprint[:16]}-{uuid.uuid4().hex[:8]}"
        place.mkdir(parents=True)
        record = self._record_path(fingerprint)
        try:
            digest = json.loads(record.read_text("utf-8"))["digest"]
            self.verify(digest)
        except (IntegrityError, ValueError, KeyError, TypeError, OSError) as error:
            if isinstance(error, IntegrityError) and self.object(digest).exists():
                self.object(digest).rename(place / "object")
        if record.exists():
            record.rename(place / "record.json")
        return place

    def last(self, pipeline: str, stage: str) -> dict[str, Any] | None:
        """What this stage of this pipeline was last executed or reused with: {"payload", "meta"}; None when never."""
        try:
            seen: dict[str, Any] = json.loads((self.root / "history" / pipeline / f"{stage}.json").read_text("utf-8"))
            return seen
        except (OSError, ValueError):
            return None

    def remember(self, pipeline: str, stage: str, record: Record) -> None:
        """Keep a record as the last of its stage, for `last`."""
        path = self.root / "history" / pipeline / f"{stage}.json"
        seen = {"payload": record.payload, "meta": record.meta, "digest": record.digest}
        if self.last(pipeline, stage) != seen:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_atomically(path, seen)

    # Publishing

    def staging_directory(self, fingerprint: str) -> Path:
        """Name of a fresh directory for one attempt; not made yet."""
        owner = f"{socket.gethostname()}.{os.getpid()}"
        return self.root / "staging" / f"{fingerprint[:16]}.{owner}.{uuid.uuid4().hex[:8]}"

    def publish(
        self, staged: Path, fingerprint: str, payload: dict[str, Any], meta: dict[str, Any], lease: Lease
    ) -> Record:
        """Hash, fsync, manifest last, rename, record: after the last rename the result exists, before it nothing does."""
        files: dict[str, dict[str, Any]] = {}
        for path in sorted(p for p in staged.rglob("*") if p.is_file()):
            if path.is_symlink():
                raise IntegrityError(f"{path}: an artifact may not hold links")
            files[path.relative_to(staged).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
            _fsync(path)
        digest = tree_digest({name: entry["sha256"] for name, entry in files.items()})
        _write_atomically(staged / MANIFEST, {"files": files, "digest": digest})
        _fsync(staged)
        meta = {**meta, "bytes": sum(int(entry["bytes"]) for entry in files.values()), "fence": lease.fence}
        record = Record(fingerprint=fingerprint, digest=digest, payload=payload, meta=meta)
        with lease.fenced():
            self._place(staged, digest)
            _write_atomically(self._record_path(fingerprint), {"digest": digest, "payload": payload, "meta": meta})
        shutil.rmtree(self.work(fingerprint), ignore_errors=True)
        return record

    def _place(self, staged: Path, digest: str) -> None:
        target = self.object(digest)
        if not target.exists():
            staged.rename(target)
        else:  # the same content is there already: keep it if it is whole, else put ours in its place
            try:
                self.verify(digest, deep=True)
                shutil.rmtree(staged)
            except IntegrityError:
                target.rename(self.root / "quarantine" / f"{digest[:16]}-{uuid.uuid4().hex[:8]}")
                staged.rename(target)
        _fsync(target.parent)

    def sweep_staging(self) -> None:
        """Remove what killed processes of this host left half written."""
        for left in (self.root / "staging").glob(f"*.{socket.gethostname()}.*.*"):
            if not psutil.pid_exists(int(left.name.split(".")[-2])):
                shutil.rmtree(left, ignore_errors=True)

    # Digests of what stands outside the store

    def path_digest(self, path: Path) -> str:
        """Content digest of a file, or of a directory's tree (names and bytes), memoised by size, mtime and inode."""
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
            return tree_digest({p.relative_to(path).as_posix(): self.file_digest(p) for p in files})
        return self.file_digest(path)

    def file_digest(self, path: Path, *, trust_memo: bool = True) -> str:
        status = path.stat()
        key, stamp = str(path), [status.st_size, status.st_mtime_ns, status.st_ino]
        memo = self._load_memo()
        if trust_memo and key in memo and memo[key][:3] == stamp:
            return str(memo[key][3])
        found = sha256_file(path)
        # A file changed less than two seconds ago may change again within the clock's grain: do not trust its mtime yet.
        if time.time_ns() - status.st_mtime_ns > 2_000_000_000:
            memo[key] = [*stamp, found]
            self._memo_changed = True
        return found

    def save_memo(self) -> None:
        """Write the digests computed by this process, if any."""
        if self._memo_changed and self._memo is not None and self.root.is_dir():
            _write_atomically(self._memo_path, self._memo)
            self._memo_changed = False

    def _load_memo(self) -> dict[str, list[Any]]:
        if self._memo is None:
            try:
                self._memo = dict(json.loads(self._memo_path.read_text("utf-8")))
            except (OSError, ValueError):
                self._memo = {}
        return self._memo

    def _record_path(self, fingerprint: str) -> Path:
        return self.root / "records" / f"{fingerprint}.json"


def tree_digest(files: dict[str, str]) -> str:
    """Digest of a tree from its files' digests: names and bytes count, times and modes do not."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _write_atomically(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    with temporary.open("w", encoding="utf-8") as handle:
        json.dump(value, handle, indent=1, sort_keys=True, allow_nan=False)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
