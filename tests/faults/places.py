"""Small, read-only and oddly named places, made with real mounts and taken away afterwards. Needs root, else the test is skipped with
the reason printed: a run with such skips is not a full pass.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(place: Path, megabytes: int = 8) -> Iterator[Path]:
    """A file system of its own at `place`; what stood there is copied onto it first, and is there again afterwards."""
    before = place.with_name(f"{place.name}.before")
    if place.exists():
        place.rename(before)
    place.mkdir(parents=True)
    _mount("-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place))
    try:
        if before.exists():
            shutil.copytree(before, place, dirs_exist_ok=True)
        yield place
    finally:
        _unmount(place)


@contextlib.contextmanager
def read_only(place: Path) -> Iterator[Path]:
    """The same directory, but nobody may write: not root either."""
    place.mkdir(parents=True, exist_ok=True)
    _mount("--bind", str(place), str(place))
    try:
        _mount("-o", "remount,bind,ro", str(place))
        yield place
    finally:
        _unmount(place)


def fill(place: Path) -> Path:
    """A file that takes all that is left. Returns it: removing it makes room again."""
    ballast = place / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert os.statvfs(place).f_bavail == 0  # the control: the disk is really full
    return ballast


def _mount(*arguments: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root: this fault was not tried")
    made = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"mounting is not permitted here ({made.stderr.strip()}): this fault was not tried")


def _unmount(place: Path) -> None:
    if subprocess.run(["umount", str(place)], capture_output=True).returncode:
        subprocess.run(["umount", "--lazy", str(place)], check=True)  # a process that ends still holds it
