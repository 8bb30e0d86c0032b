"""The content-addressed store: what is published, and how it becomes so. Apart, because nothing else writes below its root.

    objects/<digest>/            a published artifact: its files, and MANIFEST last; immutable
    results/<fingerprint>/       slots, one for each try at this result: <fence>.lease.json, and <fence>.json when it ended
    history/<pipeline>/<stage>.json   the last payloads of each stage, for `make why` and the plan's costs
    runs/<pipeline>/<id>.json    one document for each invocation that executed something, for `make gc`
    pins/ quarantine/

The root is a directory or an object store (`stages/storage/bucket.py`); the code is the same. The commit point is one create-if-absent of
`results/<fingerprint>/<fence>.json` (`pipelines/lease.py`). "Directory not empty" is never "complete": readers follow records only, and a
record whose object does not verify is set aside with a warning and made again.

What is being made stands in `scratch`, always a directory of this machine: staging/ (one directory an attempt), work/ (resumable state).
"""

import contextlib
import json
import logging
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipelines import cost
from pipelines.config import AppConfig
from pipelines.digests import Digests
from pipelines.fingerprint import recipe
from pipelines.lease import Lease, Slots, identity, owner_tag, tag_is_alive
from pipelines.mistakes import ConfigError
from stages.artifacts import MANIFEST
from stages.storage.bucket import Bucket, BucketError, fsync
from stages.storage.hashing import sha256_file, tree_digest


class IntegrityError(Exception):
    """Published bytes are not what their record says. Names the file."""


@dataclass(frozen=True)
class Deposit:
    """An object that is in the store, whole, but that no record names yet."""

    digest: str
    bytes: int


@dataclass(frozen=True)
class Record:
    """A published result."""

    fingerprint: str
    digest: str
    payload: dict[str, Any]
    meta: dict[str, Any]
    """run_id, started_at, seconds, bytes, metrics, headline, git, versions."""
    fence: int = 0


class Store:
    """Publishes attempts and finds what was published."""

    def __init__(self, root: str, scratch: Path, *, single_writer: bool = False) -> None:
        """`root`: a file:// or object-store URI. Raises ConfigError for a root that cannot be."""
        self.root = root.rstrip("/")
        self.scratch = scratch
        try:
            self.bucket = Bucket(self.root, single_writer=single_writer)
        except (ValueError, OSError) as error:
            raise ConfigError(f"store.root={self.root}: {error}") from error
        self.digests = Digests(scratch / "digests.json")

    @classmethod
    def open(cls, app: AppConfig) -> "Store":
        return cls(app.store_root, app.scratch_root, single_writer=app.store.single_writer)

    def prepare(self) -> None:
        """Before the first stage runs: the directories, and proof that this backend keeps our promises."""
        for name in ("staging", "work"):
            (self.scratch / name).mkdir(parents=True, exist_ok=True)
        try:
            broken = None if self.bucket.single_writer else self.bucket.probe()
            if self.bucket.single_writer:
                self.bucket.put(".probe", b"writable")
        except BucketError as error:
            raise ConfigError(f"store.root={self.root}: cannot be written; {error}") from error
        if broken:
            raise ConfigError(
                f"store.root={self.root} does not keep create-if-absent ({broken}): two runs could publish over each other. "
                "Use another store, or store.single_writer=true if never more than one run writes to it"
            )

    def object_uri(self, digest: str) -> str:
        return f"{self.root}/objects/{digest}"

    def object_directory(self, digest: str) -> Path | None:
        """Where the object is on this machine, when the store is a directory."""
        return self.bucket.directory / "objects" / digest if self.bucket.directory else None

    def work(self, fingerprint: str) -> Path:
        return self.scratch / "work" / fingerprint

    # Finding

    def find(self, fingerprint: str) -> tuple[Record | None, str | None]:
        """(verified newest record, None), (None, None) when there is none, or (None, what is wrong with it)."""
        record, broken = self._newest(fingerprint)
        if record is not None:
            try:
                self.verify(record.digest)
            except IntegrityError as error:
                return None, str(error)
        return record, broken

    def _newest(self, fingerprint: str) -> tuple[Record | None, str | None]:
        """The published slot with the highest fence, unverified."""
        slots = Slots.of(self.bucket, fingerprint)
        for fence in slots.fences:
            if not slots.ended(fence):
                continue
            key = f"results/{fingerprint}/{fence:06d}.json"
            try:
                data = json.loads(self.bucket.get(key) or b"")
                if data.get("removed"):  # what was the last result was taken away: an older one is not the last
                    return None, None
                if "sealed" not in data:
                    return Record(fingerprint, data["digest"], data["payload"], data["meta"], fence), None
            except (ValueError, KeyError, TypeError) as error:
                return None, f"{self.root}/{key}: unreadable record ({type(error).__name__})"
        return None, None

    def verify(self, digest: str, *, deep: bool = False, sizes_only: bool = False) -> None:
        """Raise IntegrityError unless every file of the object is there with its size and bytes. A file is hashed once for each
        size, mtime and inode (or entity tag); `deep` hashes all of them now, `sizes_only` none."""
        place = f"objects/{digest}"
        listed = self.manifest(digest)
        found = {entry.key.removeprefix(f"{place}/"): entry for entry in self.bucket.entries(place)}
        for name, (bytes_listed, sha256) in listed.items():
            where = f"{self.root}/{place}/{name}"
            if name not in found:
                raise IntegrityError(f"{where}: the file is gone")
            if found[name].bytes != bytes_listed:
                raise IntegrityError(f"{where}: {found[name].bytes} bytes, its manifest says {bytes_listed}")
            if sizes_only:
                continue
            directory = self.object_directory(digest)
            if directory is not None:
                now = self.digests.file(directory / name, trusted=not deep)
            else:
                now = self._remote(f"{place}/{name}", found[name].tag, sha256, deep)
            if now != sha256:
                raise IntegrityError(f"{where}: its bytes changed since it was published")

    def manifest(self, digest: str) -> dict[str, tuple[int, str]]:
        """File -> (bytes, sha256) of an object. Raises IntegrityError."""
        where = f"{self.object_uri(digest)}/{MANIFEST}"
        try:
            data = json.loads(self.bucket.get(f"objects/{digest}/{MANIFEST}") or b"")
            listed = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in data["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"{where}: unreadable manifest ({type(error).__name__})") from error
        if tree_digest({name: sha256 for name, (_, sha256) in listed.items()}) != digest:
            raise IntegrityError(f"{where}: does not belong to object {digest[:12]}")
        return listed

    def _remote(self, key: str, tag: str, promised: str, deep: bool) -> str:
        """sha256 of a blob in an object store: hashed when its tag is not the one that this machine knows. A blob it never saw
        is taken at its word here; whoever reads it hashes it first (`Artifact.local`)."""
        uri = f"{self.root}/{key}"
        known = self.digests.tagged(uri)
        if not deep and (known is None or known[0] == tag):
            return known[1] if known else promised
        temporary = self.staging_directory("verify")
        try:
            self.bucket.download(key, temporary)
            found = sha256_file(temporary)
        finally:
            temporary.unlink(missing_ok=True)
        self.digests.note_tagged(uri, tag, found)
        return found

    def set_aside(self, fingerprint: str, fence: int | None = None) -> str:
        """Move a broken record (of this fence; default: the newest), and its object when that is what is broken, to quarantine/.
        Returns the new place, which is the old one for a record that was set aside before."""
        place = f"quarantine/{fingerprint[:16]}-{uuid.uuid4().hex[:8]}"
        slots = Slots.of(self.bucket, fingerprint)
        for number in slots.fences if fence is None else [fence]:
            key = f"results/{fingerprint}/{number:06d}.json"
            data = self.bucket.get(key) if slots.ended(number) else None
            record = _parsed(data or b"")
            if data is None or ("sealed" in record and fence is None):
                continue
            if "sealed" in record:
                return f"{self.root}/{record.get('place', key)}"
            self.bucket.put(f"{place}/record.json", data)
            # Sealed first: from here on nobody takes it for a result, whatever comes of the rest.
            seal = {"sealed": f"set aside in {place}", "removed": True, "place": place}
            self.bucket.put(key, json.dumps(seal).encode())
            if "digest" in record:
                self._quarantine(str(record["digest"]), place)
            break
        return f"{self.root}/{place}"

    def _quarantine(self, digest: str, place: str) -> None:
        """Move an object that is not whole. What cannot be moved (S3 copies at most 5 GB) stays, and is replaced when it is made again."""
        try:
            self.verify(digest)
        except IntegrityError:
            try:
                self.bucket.move(f"objects/{digest}", f"{place}/object")
            except BucketError as error:
                logging.getLogger(__name__).warning("object %s not moved: %s", digest[:12], error)

    def records(self) -> Iterator[Record]:
        """The newest record of every result, unverified; unreadable ones are left out."""
        for fingerprint in self.bucket.children("results"):
            record, _ = self._newest(fingerprint)
            if record is not None:
                yield record

    # Publishing

    def staging_directory(self, fingerprint: str) -> Path:
        """Name of a fresh directory for one attempt; not made yet."""
        return self.scratch / "staging" / f"{fingerprint[:16]}.{owner_tag()}.{uuid.uuid4().hex[:8]}"

    def deposit(self, staged: Path) -> Deposit:
        """Hash, fsync, manifest last, and one rename into objects/ (or uploads, the manifest last). No record names it yet.
        Runs where the staged directory is; `publish` runs where the lease is."""
        files: dict[str, dict[str, Any]] = {}
        for path in sorted(p for p in staged.rglob("*") if p.is_file() or p.is_symlink()):
            if path.is_symlink():
                raise IntegrityError(f"{path}: an artifact may not hold links")
            fsync(path)
            files[path.relative_to(staged).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        digest = tree_digest({name: str(entry["sha256"]) for name, entry in files.items()})
        with (staged / MANIFEST).open("w", encoding="utf-8") as handle:
            json.dump({"files": files, "digest": digest}, handle, indent=1, sort_keys=True)
        for directory in (staged, *(p for p in staged.rglob("*") if p.is_dir())):
            fsync(directory)
        fsync(staged / MANIFEST)
        self._place(staged, digest, {name: str(entry["sha256"]) for name, entry in files.items()})
        return Deposit(digest, sum(int(entry["bytes"]) for entry in files.values()))

    def _place(self, staged: Path, digest: str, files: dict[str, str]) -> None:
        with contextlib.suppress(IntegrityError):
            self.verify(digest)
            shutil.rmtree(staged)  # the same content is there already, and whole
            return
        target = self.object_directory(digest)
        if self.bucket.get(f"objects/{digest}/{MANIFEST}") is not None or (target and target.exists()):
            self._quarantine(digest, f"quarantine/{digest[:16]}-{uuid.uuid4().hex[:8]}")
        if target is None:
            # Another run may be uploading the same bytes under the same names: whoever is last changes nothing.
            self.bucket.upload(staged, files, f"objects/{digest}")
            self.bucket.upload(staged, [MANIFEST], f"objects/{digest}")
            for entry in self.bucket.entries(f"objects/{digest}"):
                if (name := entry.key.removeprefix(f"objects/{digest}/")) in files:
                    self.digests.note_tagged(f"{self.root}/{entry.key}", entry.tag, files[name])
            shutil.rmtree(staged)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            staged.rename(target)
        except OSError:
            if not target.exists():
                raise
            self.verify(digest)  # another run of equal content was faster
            return
        fsync(target.parent)
        for name, sha256 in files.items():  # just hashed, and immutable from here: never read again for its digest
            self.digests.note(target / name, sha256)

    def publish(
        self, deposit: Deposit, fingerprint: str, payload: dict[str, Any], meta: dict[str, Any], lease: Lease
    ) -> Record:
        """The one create-if-absent after which the result exists, and before which nothing does. Raises LeaseLost."""
        meta = {**meta, "bytes": deposit.bytes}
        self._require_whole(deposit.digest)
        stands = lease.commit({"digest": deposit.digest, "payload": payload, "meta": meta})
        # From here on it is published, whatever fails.
        shutil.rmtree(self.work(fingerprint), ignore_errors=True)
        if self.bucket.directory is None:  # what an attached cluster's node mirrored there
            try:
                self.bucket.delete(entry.key for entry in self.bucket.entries(f"work/{fingerprint}"))
            except BucketError as error:  # `make gc` takes it
                logging.getLogger(__name__).warning("resumable state stays behind: %s", error)
        return Record(fingerprint, stands["digest"], stands["payload"], stands["meta"], lease.fence)

    def _require_whole(self, digest: str) -> None:
        """All files with their sizes, a moment before a record names them: `make gc` may have taken equal content meanwhile."""
        try:
            self.verify(digest, sizes_only=True)
        except IntegrityError as error:
            raise IntegrityError(f"{error}: it was removed before it was published; run again") from error

    def sweep_staging(self) -> None:
        """Remove what killed processes of this host left half written."""
        for left in self.abandoned():
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)

    def abandoned(self) -> list[Path]:
        """What stands in staging/ and belongs to a process that is known to be gone."""
        found = sorted((self.scratch / "staging").glob("*.*.*"))
        return [path for path in found if not tag_is_alive(path.name.partition(".")[2].rpartition(".")[0])]

    # What was done before

    def last(self, pipeline: str, stage: str) -> dict[str, Any] | None:
        """What this stage of this pipeline was last executed or reused with: {"payload", "meta", "digest", "recent"}; None when
        never."""
        return self._document(f"history/{pipeline}/{stage}.json")

    def remember(self, pipeline: str, stage: str, record: Record) -> None:
        """Keep a record as the last of its stage, for `last`, and its execution among the recent ones (`pipelines/cost.py`)."""
        before = self.last(pipeline, stage)
        execution = cost.entry(record.fingerprint, record.fence, recipe(record.payload), record.meta)
        recent = cost.remember((before or {}).get("recent", []), execution)
        seen = {"payload": record.payload, "meta": record.meta, "digest": record.digest, "recent": recent}
        if before != seen:
            self._put(f"history/{pipeline}/{stage}.json", seen)

    def begin_run(self, pipeline: str, facts: dict[str, Any]) -> str:
        """Enter an invocation in the ledger: what it needs is kept while it is not ended. Returns its id, sortable by time."""
        now = datetime.now(UTC)  # to the microsecond: the points of a sweep may begin within one second
        run = f"{now:%Y%m%dT%H%M%S}-{now.microsecond:06d}-{uuid.uuid4().hex[:8]}"
        self._put(f"runs/{pipeline}/{run}.json", {**facts, "owner": identity(), "ended": False})
        return run

    def note_run(self, pipeline: str, run: str, facts: dict[str, Any]) -> None:
        """Add what became known meanwhile: fingerprint and digest of each step (`pipelines/ledger.py`)."""
        key = f"runs/{pipeline}/{run}.json"
        self._put(key, {**(self._document(key) or {}), **facts})

    def end_run(self, pipeline: str, run: str, facts: dict[str, Any]) -> None:
        """Add what came out."""
        self.note_run(pipeline, run, {**facts, "ended": True})

    def runs(self, pipeline: str | None = None) -> list[dict[str, Any]]:
        """The ledger, oldest first: each document with its `id` and `pipeline`."""
        found = []
        for name in [pipeline] if pipeline else self.bucket.children("runs"):
            for file in self.bucket.children(f"runs/{name}"):
                document = self._document(f"runs/{name}/{file}")
                found.append({**(document or {}), "id": file.removesuffix(".json"), "pipeline": name})
        return sorted(found, key=lambda run: str(run["id"]))

    def _document(self, key: str) -> dict[str, Any] | None:
        try:
            loaded: dict[str, Any] = json.loads(self.bucket.get(key) or b"")
            return loaded
        except ValueError:
            return None

    def _put(self, key: str, value: dict[str, Any]) -> None:
        self.bucket.put(key, json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode())


def _parsed(data: bytes) -> dict[str, Any]:
    """A record or a seal; {} for what is neither."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
