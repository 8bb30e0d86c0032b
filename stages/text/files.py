"""Where a person's files are: a path, a directory, a glob, or the same in an object store. Apart from reading them, because
planning asks for their names and their identity and must load nothing heavy.

Names are relative to the directory or to the fixed part of the glob, so that ids do not depend on where files lie.
"""

import fnmatch
import glob
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath

from stages.contract import ResourcesUnavailable, StageError
from stages.text.opening import opened

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
    ".rar": "unpack it and give the directory",
    ".bz2": "compress it again as .gz or .zst",
    ".xz": "compress it again as .gz or .zst",
    ".lz4": "compress it again as .gz or .zst",
    ".part": "it looks like a download that is not finished",
    ".crdownload": "it looks like a download that is not finished",
    ".sqlite": "write its table out as CSV or JSONL",
    ".db": "write its table out as CSV or JSONL",
    ".7z": "unpack it and give the directory",
    ".arrow": "write it again as Parquet",
    ".feather": "write it again as Parquet",
    ".pkl": "pickles can run code; write it again as Parquet or JSONL",
    ".pdf": "extract its text to .txt",
    ".docx": "extract its text to .txt",
    ".html": "extract its text to .txt",
    ".htm": "extract its text to .txt",
}
BESIDE = (
    "dataset_dict.json",
    "dataset_info.json",
    "dataset_infos.json",
    "message_feedback.json",
    "projects.json",
    "shared_conversations.json",
    "state.json",
    "user.json",
    "users.json",
)
"""What tools and products put beside files of rows: descriptions of a data set, the account of an export."""
OTHER_SPLITS = frozenset({"test", "tests", "validation", "valid", "val", "dev", "eval", "heldout"})
"""Words in the names of files that nobody means to learn from."""


def words(name: str) -> set[str]:
    """In a file's path."""
    return set(re.split(r"[^a-z]+", name.lower()))


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
    left_out: tuple[str, ...] = ()
    """One word for each, an ending or a name."""


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
    single, candidates = _remote(path, container) if "://" in path else _local(path, container)
    return chosen(path, candidates, container, single=single)


def chosen(path: str, candidates: Iterable["Candidate"], container: Container, *, single: bool) -> Found:
    """Those that can be read, by their names' ends. Beside files of rows, text is somebody's README and stays out."""
    candidates = list(candidates)
    known: list[File] = []
    for c in candidates:
        kind, compression = _kind(c.name)
        if container is not Container.auto:
            kind, compression = container, compression or _magic(c)
        if kind is not None:
            known.append(File(c.name, c.where, c.key, c.bytes, kind, compression, c.tag))
    rows = [
        file for file in known if file.container is not Container.text and PurePosixPath(file.name).name not in BESIDE
    ]
    taken = rows if rows and not single else known
    if not taken:
        raise StageError(_refusal(path, [c.name for c in candidates]))
    taken.sort(key=lambda file: f"{file.name}:")
    left = {c.name for c in candidates} - {file.name for file in taken}
    return Found(tuple(taken), tuple(sorted(_word(PurePosixPath(name)) for name in left)))


def _word(name: PurePosixPath) -> str:
    return name.name if name.name in BESIDE or not name.suffix else name.suffix.lower()


def _refusal(path: str, names: list[str]) -> str:
    known = ", ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
    ends = sorted({".tar" if ".tar." in name.lower() else PurePosixPath(name).suffix.lower() for name in names})
    advice = next((f"; {ADVICE[end]}" for end in ends if end in ADVICE), "")
    if not names:
        found = "nothing"
    elif len(names) == 1:
        found = f"a file that ends in {ends[0]!r}" if ends[0] else "a file whose name has no ending"
    else:
        found = f"{len(names):,} files that end in {', '.join(repr(end) for end in ends[:5])}"
    return (
        f"stages.ingest.source.path={path}: found {found}, want {known}, each but .parquet also with .gz or .zst{advice}; "
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


def _local(path: str, container: Container) -> tuple[bool, list[Candidate]]:
    where = Path(path).expanduser()
    if where.is_dir():
        root, found = where, [file for file in _below(where) if not _hidden(file.relative_to(where))]
    elif where.exists() or not glob.has_magic(path):
        root, found = where.parent, [where]
    else:
        parts = where.parts
        magic = next(i for i, part in enumerate(parts) if glob.has_magic(part))
        root = Path(*parts[:magic])
        found = list(root.glob(str(Path(*parts[magic:]))))
        if "**" in parts[magic:-1]:  # pathlib passes over what it may not open, and over links
            matches = re.compile(_translated("/".join(parts[magic:]))).fullmatch
            found = [file for file in _below(root, hidden=True) if matches(file.relative_to(root).as_posix())]
    files = [file for file in found if not file.is_dir()]
    single = files == [where]
    for file in files:
        if single or container is not Container.auto or _kind(file.name)[0] is not None:
            _refuse_unreadable(file)
    return single, [listed(file, root) for file in files]


def _below(root: Path, *, hidden: bool = False) -> Iterator[Path]:
    """All files below a directory, through links too; a link to a directory that it lies in leads nowhere new."""

    def refuse(error: OSError) -> None:
        raise StageError(
            f"stages.ingest.source.path: the directory {error.filename} cannot be read by this user "
            f"({error.strerror}); change its permissions, or leave it out with a glob"
        )

    for where, directories, names in os.walk(root, onerror=refuse, followlinks=True):
        here = Path(where).absolute()
        above = {path.resolve() for path in (here, *here.parents)}
        links = {name for name in directories if (here / name).is_symlink() and (here / name).resolve() in above}
        directories[:] = [n for n in directories if n not in links and (hidden or not n.startswith("."))]
        yield from (Path(where, name) for name in names)


def listed(file: Path, root: Path) -> Candidate:
    size = file.stat().st_size if file.is_file() else 0
    return Candidate(file.relative_to(root).as_posix(), str(file.absolute()), "", size)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _refuse_unreadable(file: Path) -> None:
    if file.is_symlink() and not file.exists():
        raise StageError(f"stages.ingest.source.path: {file} is a link to a file that is not there; remove or mend it")
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


def _remote(uri: str, container: Container) -> tuple[bool, list[Candidate]]:
    """What an object store holds below a URI; its entity tags are the files' identity."""
    from stages.storage.bucket import SCHEMES, Bucket, BucketError

    scheme, _, rest = uri.partition("://")
    if scheme not in SCHEMES:
        raise StageError(
            f"stages.ingest.source.path={uri}: {scheme}:// is not known; want a path, s3://, gs:// or az:// "
            "(a hub's data set: stages.ingest.source.hub=owner/name)"
        )
    if scheme == "file":
        return _local(f"/{rest.partition('/')[2]}", container)
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
