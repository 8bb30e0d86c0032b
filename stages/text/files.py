"""Where a person's files are: a path, a directory, a glob, or the same in an object store. Apart from reading them, because
planning asks for their names and their identity and must load nothing heavy.

Names are relative to the directory or to the fixed part of the glob, so that ids do not depend on where files lie.
"""

import fnmatch
import glob
import io
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from stages.contract import ResourcesUnavailable, StageError

if TYPE_CHECKING:
    from stages.storage.bucket import Bucket

READ_AHEAD = 8 * 2**20
"""Bytes that one request to an object store asks for."""
MAGIC = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zst"}


class Container(Enum):
    """How rows are packed in a file."""

    auto = "auto"
    jsonl = "jsonl"
    json = "json"
    parquet = "parquet"
    csv = "csv"
    tsv = "tsv"
    text = "text"


class TextUnit(Enum):
    """What makes one row of a text file."""

    file = "file"
    paragraph = "paragraph"
    line = "line"


SUFFIXES = {
    Container.jsonl: (".jsonl", ".json-lines", ".ndjson"),
    Container.json: (".json",),
    Container.parquet: (".parquet",),
    Container.csv: (".csv",),
    Container.tsv: (".tsv",),
    Container.text: (".txt", ".md"),
}
COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
ADVICE = {
    ".xlsx": "save the sheet as CSV (UTF-8)",
    ".xls": "save the sheet as CSV (UTF-8)",
    ".zip": "unpack it and give the directory",
    ".tar": "unpack it and give the directory",
    ".tgz": "unpack it and give the directory",
    ".bz2": "compress it again as .gz or .zst",
    ".xz": "compress it again as .gz or .zst",
    ".7z": "unpack it and give the directory",
    ".arrow": "write it again as Parquet",
    ".feather": "write it again as Parquet",
    ".pkl": "pickles can run code; write it again as Parquet or JSONL",
    ".pdf": "extract its text to .txt",
    ".docx": "extract its text to .txt",
    ".html": "extract its text to .txt",
}


@dataclass(frozen=True)
class File:
    """One file to read."""

    name: str
    """Relative, with `/`: what ids and messages say."""
    where: str
    """Absolute path, or URI of the bucket that holds it."""
    key: str
    """Its key in that bucket; empty for a path."""
    bytes: int
    container: Container
    compression: str = ""
    """gz, zst or empty."""
    tag: str = ""
    """Changes when the content does; empty for a path."""

    @property
    def identity(self) -> str:
        return f"{self.tag}:{self.bytes}"


@dataclass(frozen=True)
class Found:
    """The files of a source in the order of their ids, and how many were left out."""

    files: tuple[File, ...]
    left_out: int = 0


@dataclass(frozen=True)
class Candidate:
    """A file that may be one to read."""

    name: str
    where: str
    key: str
    bytes: int
    tag: str = ""


def find(path: str, container: Container = Container.auto) -> Found:
    """What `path` names: a file, a directory with all below it, or a glob; below an object store's URI too."""
    single, candidates = _remote(path) if "://" in path else _local(path)
    return chosen(path, candidates, container, single=single)


def chosen(path: str, candidates: Iterable["Candidate"], container: Container, *, single: bool) -> Found:
    """Those that can be read, by their names' ends. Text beside files of rows is somebody's README and stays out."""
    candidates = list(candidates)
    known: list[File] = []
    for c in candidates:
        kind, compression = _kind(c.name)
        if container is not Container.auto:
            kind, compression = container, compression or _magic(c)
        if kind is not None:
            known.append(File(c.name, c.where, c.key, c.bytes, kind, compression, c.tag))
    rows = [file for file in known if file.container is not Container.text]
    taken = rows if rows and not single else known
    if not taken:
        raise StageError(_refusal(path, [c.name for c in candidates]))
    taken.sort(key=lambda file: f"{file.name}:")
    return Found(tuple(taken), len(candidates) - len(taken))


def _refusal(path: str, names: list[str]) -> str:
    known = ", ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
    ends = sorted({PurePosixPath(name).suffix.lower() for name in names})
    advice = next((f"; {ADVICE[end]}" for end in ends if end in ADVICE), "")
    if not names:
        found = "nothing"
    elif len(names) == 1:
        found = f"a file that ends in {ends[0]!r}" if ends[0] else "a file whose name has no ending"
    else:
        found = f"{len(names):,} files that end in {', '.join(repr(end) for end in ends[:5])}"
    return (
        f"stages.ingest.source.path={path}: found {found}, want {known}, each also with .gz or .zst{advice}; "
        "or say what it is: stages.ingest.source.container=jsonl (json, parquet, csv, tsv, text)"
    )


def _kind(name: str) -> tuple[Container | None, str]:
    lower = name.lower()
    ending = next((end for end in COMPRESSIONS if lower.endswith(end)), "")
    lower = lower.removesuffix(ending)
    for container, suffixes in SUFFIXES.items():
        if lower.endswith(suffixes):
            return container, COMPRESSIONS.get(ending, "")
    return None, COMPRESSIONS.get(ending, "")


def _magic(candidate: Candidate) -> str:
    """Compression by the first bytes, for a file whose name says nothing."""
    with opened(File(candidate.name, candidate.where, candidate.key, candidate.bytes, Container.text)) as stream:
        head = stream.read(4)
    return next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), "")


def _local(path: str) -> tuple[bool, list[Candidate]]:
    where = Path(path).expanduser()
    if where.is_dir():
        root, found = where, [file for file in where.rglob("*") if not _hidden(file.relative_to(where))]
    elif where.exists() or not glob.has_magic(path):
        root, found = where.parent, [where]
    else:
        parts = where.parts
        magic = next(i for i, part in enumerate(parts) if glob.has_magic(part))
        root = Path(*parts[:magic])
        found = list(root.glob(str(Path(*parts[magic:]))))
    files = [file for file in found if not file.is_dir()]
    for file in files:
        _refuse_unreadable(file)
    return files == [where], [listed(file, root) for file in files]


def listed(file: Path, root: Path) -> Candidate:
    return Candidate(file.relative_to(root).as_posix(), str(file.absolute()), "", file.stat().st_size)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _refuse_unreadable(file: Path) -> None:
    if not file.exists():
        raise StageError(f"stages.ingest.source.path: no file or directory {file} (seen from {Path.cwd()})")
    if any("\ud800" <= character <= "\udfff" for character in file.name):
        raise StageError(
            f"stages.ingest.source.path: a file in {file.parent} has a name that is not UTF-8; rename it "
            "(its name goes into the ids of its rows)"
        )
    if not file.is_file():
        raise StageError(
            f"stages.ingest.source.path: {file} is no ordinary file (a pipe or a device); save it as a file"
        )
    if not os.access(file, os.R_OK):
        raise StageError(f"stages.ingest.source.path: {file} cannot be read by this user; change its permissions")


def _remote(uri: str) -> tuple[bool, list[Candidate]]:
    """What an object store holds below a URI; its entity tags are the files' identity."""
    from stages.storage.bucket import SCHEMES, Bucket, BucketError

    scheme, _, rest = uri.partition("://")
    if scheme not in SCHEMES:
        raise StageError(
            f"stages.ingest.source.path={uri}: {scheme}:// is not known; want a path, s3://, gs:// or az:// "
            "(a hub's data set: stages.ingest.source.hub=owner/name)"
        )
    if scheme == "file":
        return _local(f"/{rest.partition('/')[2]}")
    parts = rest.rstrip("/").split("/")
    magic = next((i for i, part in enumerate(parts) if i and glob.has_magic(part)), len(parts))
    root, pattern = f"{scheme}://{'/'.join(parts[:magic])}", "/".join(parts[magic:])
    try:
        entries = Bucket(root).entries("")
        if not entries and not pattern and len(parts) > 1:
            root, name = root.rpartition("/")[0], parts[-1]
            entry = Bucket(root).entry(name)
            return True, [Candidate(name, root, name, entry.bytes, entry.tag)] if entry else _nothing(uri)
    except BucketError as error:
        raise ResourcesUnavailable(f"stages.ingest.source.path: {error}") from error
    if pattern:
        matches = re.compile(_translated(pattern)).fullmatch
        entries = [entry for entry in entries if matches(entry.key)]
    else:
        entries = [entry for entry in entries if not _hidden(Path(entry.key))]
    if not entries:
        _nothing(uri)
    return False, [Candidate(entry.key, root, entry.key, entry.bytes, entry.tag) for entry in entries]


def _nothing(uri: str) -> list[Candidate]:
    raise StageError(f"stages.ingest.source.path={uri}: the object store has nothing there; look at the spelling")


def _translated(pattern: str) -> str:
    """A glob as a regular expression over keys: `**` any directories, `*` within a name."""
    regex = ""
    for part in pattern.split("/"):
        if part == "**":
            regex += "(?:[^/]+/)*"
            continue
        piece = fnmatch.translate(part).removeprefix("(?s:").removesuffix(r")\Z")
        regex += piece.replace(".*", "[^/]*") + "/"
    return regex.removesuffix("/")


def opened(file: File, start: int = 0) -> IO[bytes]:
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
