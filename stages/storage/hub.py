"""Which commit a hub's repository is at, and where its files are kept on this machine. Apart, because models and data sets
are found in the same way, at plan time and offline whenever the local cache knows."""

import os
import re
from pathlib import Path
from typing import Any, Literal

from stages.contract import ResourcesUnavailable, StageError

Kind = Literal["model", "dataset"]
COMMIT = re.compile(r"[0-9a-f]{40}")
TIMEOUT_S = 10


def resolve_commit(repository: str, revision: str, kind: Kind, called: str, instead: str) -> str:
    """The 40-hex commit of a revision: itself, or what the local cache remembers, or what the hub says. In messages it is
    `called` so, and `instead` is what else may be given."""
    if COMMIT.fullmatch(revision):
        return revision
    reference = cache() / f"{kind}s--{repository.replace('/', '--')}" / "refs" / revision
    if reference.is_file():
        return reference.read_text("utf-8").strip()
    try:
        commit = library().HfApi().repo_info(repository, repo_type=kind, revision=revision, timeout=TIMEOUT_S).sha
    except Exception as error:
        raise ResourcesUnavailable(
            f"{called} at {revision}: not in the local cache {cache()} and the hub does not answer "
            f"({type(error).__name__}); give {instead}, or the 40-hex commit of what the cache holds"
        ) from error
    if not commit or not COMMIT.fullmatch(commit):
        raise StageError(f"{called} at {revision}: the hub names no commit")
    found: str = commit
    return found


def library() -> Any:
    """The hub's client, told to report nothing about its user."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub

    return huggingface_hub


def cache() -> Path:
    """Where the client keeps files."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
