"""The tools that we measure ourselves against, each in a virtual environment of its own. Apart, because none of them may ever
meet our dependencies: an environment is made on first use, below the state directory, and kept.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.machine import ROOT, clean_environment

PINNED = {
    "dvc": "3.67.1",
    "metaflow": "2.19.39",
    "dagster": "1.13.29",
    "datasets": "5.2.0",
    "datatrove": "0.10.1",
    "datasketch": "2.0.0",
    "trl": "1.16.0",
    "xllamacpp": "2026.10.11549",
}
SAME_TOKENIZERS = "tokenizers==0.23.3"
"""Ours, so that no arm has a faster tokenizer."""
WITH = {
    "datasets": [SAME_TOKENIZERS],
    "datatrove": [
        SAME_TOKENIZERS,
        "xxhash==3.8.2",
        "regex==2026.11.19",
        "fasteners==0.20",
        "orjson==3.13.0",
        "spacy==3.8.18",
    ],
    "trl": [
        SAME_TOKENIZERS,
        "torch==2.13.0",
        "transformers==5.24.0",
        "accelerate==1.15.0",
        "datasets==5.2.0",
        "jinja2==3.1.6",
    ],
}
"""What a tool needs for the work that it is given and does not bring, and what must be as ours is."""
PLACE = ROOT / ".raykeel" / "bench"
INSTALL_TIMEOUT_S = 600.0


def installed(name: str, say: Callable[[str], None]) -> Path:
    """The `bin` directory of a tool's own environment. RuntimeError with pip's last lines when it cannot be made."""
    directory = PLACE / f"venv-{name}"
    ready = directory / f".ready-{PINNED[name]}"
    if not ready.exists():
        say(f"installing {name} {PINNED[name]} into {directory.relative_to(ROOT)} (once)")
        shutil.rmtree(directory, ignore_errors=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        _require(sys.executable, "-m", "venv", str(directory))
        pip = str(directory / "bin" / "pip")
        _require(pip, "install", "-q", "--disable-pip-version-check", f"{name}=={PINNED[name]}", *WITH.get(name, ()))
        ready.touch()
    return directory / "bin"


def pinned(name: str) -> dict[str, str]:
    """For a result's details: the tool's version, where the arm is a tool."""
    return {name: PINNED[name]} if name in PINNED else {}


def environment(home: Path, **more: str) -> dict[str, str]:
    """What a tool runs in: nothing of ours to import, no settings of this user, no usage reports to anybody."""
    ours = clean_environment()
    kept = {k: v for k, v in ours.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "HF_HUB_OFFLINE")}
    home.mkdir(parents=True, exist_ok=True)
    return {**kept, "HOME": str(home), "DVC_NO_ANALYTICS": "1", "USERNAME": "bench", **more}


def _require(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
        raise RuntimeError(f"{' '.join(command[1:4])} ended with {done.returncode}\n{said}")
