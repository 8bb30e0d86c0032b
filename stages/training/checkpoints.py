"""Resumable state on disk: written so that a kill at any moment leaves either a whole checkpoint or none.

A checkpoint is `step-<8 digits>/state.pt` (written by `torch.save`, read with `weights_only=True` after its SHA-256 agrees)
and `complete.json` (step, size, SHA-256), written last; the directory appears by one rename. Apart from `export`, because
this is our own private format with optimizer state, and never leaves the work directory.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

STATE, COMPLETE = "state.pt", "complete.json"


def save(directory: Path, step: int, state: dict[str, Any], *, keep: int = 2, best: int | None = None) -> Path:
    """Write the checkpoint of `step` under `directory` and remove all but the `keep` newest ones and that of step `best`."""
    directory.mkdir(parents=True, exist_ok=True)
    temporary, final = directory / f".writing-{step:08d}", of_step(directory, step)
    for stale in (*directory.glob(".writing-*"), final):
        shutil.rmtree(stale, ignore_errors=True)
    temporary.mkdir()
    torch.save(state, temporary / STATE)
    _sync(temporary / STATE)
    size, digest = _facts(temporary / STATE)
    (temporary / COMPLETE).write_text(json.dumps({"step": step, "size": size, "sha256": digest}))
    _sync(temporary / COMPLETE)
    _sync(temporary)
    temporary.rename(final)
    _sync(directory)
    for old in sorted(directory.glob("step-*"))[:-keep]:
        if best is None or old != of_step(directory, best):
            shutil.rmtree(old, ignore_errors=True)
    return final


def of_step(directory: Path, step: int) -> Path:
    """Where the checkpoint after `step` optimizer steps is, if there is one."""
    return directory / f"step-{step:08d}"


def is_whole(checkpoint: Path) -> bool:
    """Whether all of it is there as it was written."""
    return _broken(checkpoint) is None


def newest(directory: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint, or None. A broken one is passed over with a line that names it and what is used instead."""
    broken: list[str] = []
    found = None
    for candidate in sorted(directory.glob("step-*"), reverse=True):
        reason = _broken(candidate)
        if reason is None:
            found = candidate
            break
        broken.append(f"{candidate.name} ({reason})")
    if broken:
        instead = f"continuing from {found.name}" if found else "starting from step 0"
        warn(f"checkpoint {', '.join(broken)} is not whole: {instead}")
    return found


def load(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint that `newest` returned."""
    state: dict[str, Any] = torch.load(checkpoint / STATE, map_location="cpu", weights_only=True)
    return state


def _broken(checkpoint: Path) -> str | None:
    try:
        promised = json.loads((checkpoint / COMPLETE).read_text())
        size, digest = _facts(checkpoint / STATE)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: unreadable or without {COMPLETE}"
    if not isinstance(promised, dict) or promised.get("size") != size:
        return f"{STATE} has {size} bytes"
    return None if promised.get("sha256") == digest else f"{STATE} has another SHA-256"


def _facts(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
