"""A node's own copies of artifacts that live in an object store: fetched once a node, hashed before anybody reads them. Apart,
because a stage asks for a directory and need not know where the artifact lives.

Copies stand under RAYKEEL_CACHE (default ~/.cache/raykeel), named by content digest; they may be removed whenever no stage reads them.
"""

import fcntl
import hashlib
import json
import os
import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

MANIFEST = "MANIFEST.json"
FETCHED = ".fetched.json"
"""In a copy: size, mtime and inode of each file when it was hashed. A file that differs is not trusted."""


class BrokenCopy(Exception):
    """The artifact cannot be fetched, or its bytes are not what its manifest says. Names the file."""


def local(uri: str) -> Path:
    """The directory behind an artifact's URI on this node. Raises BrokenCopy."""
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
    from stages.storage.bucket import Bucket, BucketError

    partial = copy.with_name(f".{copy.name}.{uuid.uuid4().hex[:8]}")
    try:
        bucket = Bucket(uri)
        manifest = json.loads(bucket.get(MANIFEST) or b"null")
        if manifest is None:
            raise BrokenCopy(f"{uri}: there is no such artifact ({MANIFEST} is missing)")
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: bucket.download(name, partial / name), manifest["files"]))
        for name, entry in manifest["files"].items():
            with (partial / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    raise BrokenCopy(f"{uri}/{name}: its bytes changed since it was published")
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
        (partial / FETCHED).write_text(json.dumps({name: _stamp(partial / name) for name in manifest["files"]}))
        partial.rename(copy)
    except BucketError as error:
        raise BrokenCopy(str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_untouched(copy: Path) -> bool:
    try:
        stamps = json.loads((copy / FETCHED).read_text())
        return all(_stamp(copy / name) == stamp for name, stamp in stamps.items())
    except (OSError, ValueError):
        return False


def _stamp(path: Path) -> list[Any]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]
