"""The digests by which content is known: of a file, and of a tree. Apart, because publishing, verifying and fetching must agree."""

import hashlib
from pathlib import Path


def tree_digest(files: dict[str, str]) -> str:
    """Digest of a tree from its files' digests: names and bytes count, times and modes do not."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """64 hex characters."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
