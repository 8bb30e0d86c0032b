"""A node's own copies of artifacts that live in an object store: fetched once a node, hashed before anybody reads them. Apart,
because a stage asks for a directory and need not know where the artifact lives.

Copies stand under RAYKEEL_CACHE (default ~/.cache/raykeel), named by content digest; they may be removed whenever no stage reads them.
"""

import fcntl
import json
import os
import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from stages.storage.hashing import sha256_file, tree_digest

MANIFEST = "MANIFEST.json"
FETCHED = ".fetched.json"
"""In a copy: size, mtime and inode of each file when it was hashed. A file that differs is not trusted."""


class WrongBytes(Exception):
    """What the object store holds is not what was published. Names the file."""


def local(uri: str) -> Path:
    """The directory behind an artifact's URI on this node. Raises WrongBytes, and BucketError when it cannot be fetched now."""
    parsed = urlparse(uri)
    if parsed.scheme == "file":
        return Path(unquote(parsed.path))
    copy = cache() / parsed.path.rstrip("/").rpartition("/")[2]
    copy.parent.mkdir(parents=True, exist_ok=True)
    with copy.with_suffix(".lock").open(
        "w"
    ) as lock:  # one download a node; the kernel drops the lock of a killed process
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_untouched(copy):
            shutil.rmtree(copy, ignore_errors=True)
            _fetch(uri, copy)
    return copy


def cache() -> Path:
    """Where this node keeps its copies."""
    chosen = os.environ.get("RAYKEEL_CACHE")
    return (Path(chosen) if chosen else Path.home() / ".cache" / "raykeel") / "objects"


def _fetch(uri: str, copy: Path) -> None:
    """Download beside the final place, hash every file, rename."""
    from stages.storage.bucket import BlobMissing, Bucket

    partial = copy.with_name(f".{copy.name}.{uuid.uuid4().hex[:8]}")
    try:
        bucket = Bucket(uri)
        manifest = _manifest(uri, bucket.get(MANIFEST))
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: bucket.download(name, partial / name), manifest))
        for name, sha256 in manifest.items():
            if sha256_file(partial / name) != sha256:
                raise WrongBytes(f"{uri}/{name}: its bytes changed since it was published")
        bucket.download(MANIFEST, partial / MANIFEST)
        (partial / FETCHED).write_text(json.dumps({name: _stamp(partial / name) for name in manifest}))
        partial.rename(copy)
    except BlobMissing as error:
        raise WrongBytes(f"{error}: the file is gone") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _manifest(uri: str, data: bytes | None) -> dict[str, str]:
    """File -> sha256, of the object that the URI names by its digest."""
    if data is None:
        raise WrongBytes(f"{uri}: there is no such artifact ({MANIFEST} is missing)")
    try:
        files = {str(name): str(entry["sha256"]) for name, entry in json.loads(data)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WrongBytes(f"{uri}/{MANIFEST}: unreadable ({type(error).__name__})") from error
    if tree_digest(files) != uri.rstrip("/").rpartition("/")[2]:
        raise WrongBytes(f"{uri}/{MANIFEST}: does not belong to this artifact")
    return files


def _is_untouched(copy: Path) -> bool:
    try:
        stamps = json.loads((copy / FETCHED).read_text())
        return all(_stamp(copy / name) == stamp for name, stamp in stamps.items())
    except (OSError, ValueError):
        return False


def _stamp(path: Path) -> list[Any]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]
