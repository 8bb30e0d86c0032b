"""Resumable state on disk: written so that a kill at any moment leaves either a whole checkpoint or none.

A checkpoint is `step-<8 digits>/state.pt` (written by `torch.save`, read with `weights_only=True`), of a split model also what
each worker wrote, and `complete.json` (step, and size and SHA-256 of each file), written last and compared before anything is
read; the directory appears by one rename. Apart from `export`, because
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
    begin(directory, step)
    return complete(directory, step, state, keep=keep, best=best)


def begin(directory: Path, step: int) -> Path:
    """An empty place for the checkpoint of `step`, which is none yet."""
    temporary = writing(directory, step)
    for stale in (*directory.glob(".writing-*"), of_step(directory, step)):
        shutil.rmtree(stale, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def complete(directory: Path, step: int, state: dict[str, Any], *, keep: int = 2, best: int | None = None) -> Path:
    """Make a checkpoint of what was begun and written there, and of `state`; remove old ones."""
    temporary, final = writing(directory, step), of_step(directory, step)
    torch.save(state, temporary / STATE)
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    facts = {str(path.relative_to(temporary)): _facts(path) for path in files}
    (temporary / COMPLETE).write_text(json.dumps({"step": step, "files": facts}))
    for path in (*files, temporary / COMPLETE, *(p for p in temporary.iterdir() if p.is_dir()), temporary):
        _sync(path)
    temporary.rename(final)
    _sync(directory)
    for old in sorted(directory.glob("step-*"))[:-keep]:
        # What was just written stays, also where a later one stands that is not whole and was passed over.
        if old != final and (best is None or old != of_step(directory, best)):
            shutil.rmtree(old, ignore_errors=True)
    return final


def writing(directory: Path, step: int) -> Path:
    """Where the checkpoint of `step` is before it is one."""
    return directory / f".writing-{step:08d}"


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
        promised = json.loads((checkpoint / COMPLETE).read_text())["files"]
        found = {name: _facts(checkpoint / name) for name in {STATE, *promised}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: unreadable or without {COMPLETE}"
    for name, (size, digest) in sorted(found.items()):
        if promised.get(name, [None])[0] != size:
            return f"{name} has {size} bytes"
        if promised[name][1] != digest:
            return f"{name} has another SHA-256"
    return None


def _facts(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
