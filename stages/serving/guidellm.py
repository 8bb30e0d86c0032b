"""The load generator: guidellm, in an environment of its own, told by a file and heard by one. Apart, because it is the only code that
knows that tool; it measures as a client does and imports nothing of ours.

Its dependencies and ours exclude each other (it wants another click), so it is a program to us, never an import: `make load-tool`.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.contract import ResourcesUnavailable, StageError

OUTPUT, SCENARIO, LOG = "measured.json", "scenario.json", "guidellm.log"
KEY = "GUIDELLM__SPEC__BACKEND__API_KEY"
"""Where the tool finds the endpoint's key: its environment, so that no file holds it."""


@dataclass(frozen=True)
class Request:
    """One request as its client saw it. None: it never came so far."""

    ok: bool
    began: float | None
    """Unix seconds at which it was sent; in an open loop at which it was due, so that a client that is late hides no waiting."""
    first: float | None
    """Unix seconds of the first token, and of the last one."""
    last: float | None
    ended: float | None
    tokens: int

    @property
    def ttft_ms(self) -> float | None:
        return _ms(self.began, self.first)

    @property
    def itl_ms(self) -> float | None:
        """Mean milliseconds between its tokens, the first one's wait not counted."""
        between = _ms(self.first, self.last)
        return between / (self.tokens - 1) if between is not None and self.tokens > 1 else None

    @property
    def latency_ms(self) -> float | None:
        return _ms(self.began, self.ended)


def _ms(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else 1000 * (end - begin)


def find(program: str) -> str:
    """The program's path. ResourcesUnavailable when it is not there."""
    found = shutil.which(program)
    if found is None:
        raise ResourcesUnavailable(
            f"load: the load generator is not at {program}: run make load-tool once, or set stages.load.resources.program"
        )
    return str(Path(found).absolute())


def run(program: str, spec: dict[str, Any], directory: Path, key: str, tick: Callable[[float], None]) -> list[Request]:
    """Carry out `spec` (the tool's own schema) and read what it measured. StageError with its last words when it fails."""
    directory.mkdir(parents=True, exist_ok=True)
    output = directory / OUTPUT
    output.unlink(missing_ok=True)
    told = {**spec, "outputs": [{"kind": "json", "path": str(output)}]}
    (directory / SCENARIO).write_text(json.dumps({"spec": told}, indent=1, sort_keys=True), "utf-8")
    command = [program, "run", "-c", str(directory / SCENARIO), "--disable-console"]
    began = time.monotonic()
    with (directory / LOG).open("wb") as log:
        # In a directory of its own: the tool reads a file .env where it stands.
        process = subprocess.Popen(
            command, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(key)
        )
        try:
            while process.poll() is None:
                tick(time.monotonic() - began)
                time.sleep(0.2)
        finally:
            process.kill()
            process.wait()
    if process.returncode or not output.exists():
        raise StageError(f"load: the load generator ended with {process.returncode}: {_last_words(directory / LOG)}")
    return read(output, open_loop="rate" in spec["profile"])


def read(path: Path, open_loop: bool) -> list[Request]:
    """Every request that was sent, failed ones too. StageError when the file is not as this version of the tool writes it."""
    begin = "targeted_start" if open_loop else "request_start"
    try:
        (measured,) = json.loads(path.read_text("utf-8"))["benchmarks"]
        told = measured["requests"]
        return [
            *(_request(request, begin, ok=True) for request in told["successful"]),
            *(_request(request, begin, ok=False) for request in told["errored"]),
            *(_request(request, begin, ok=False) for request in told["incomplete"]),
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise StageError(
            f"load: what the load generator wrote is not understood ({error!r}): run make load-tool"
        ) from error


def _request(told: dict[str, Any], begin: str, ok: bool) -> Request:
    times = told["info"]["timings"]
    return Request(
        ok=ok,
        began=times[begin],
        first=times["first_token_iteration"],
        last=times["last_token_iteration"],
        ended=times["request_end"],
        tokens=told["output_tokens"] or 0,
    )


def _environment(key: str) -> dict[str, str]:
    """Nothing of ours to import, no hub, no usage reports, no proxy between us and the endpoint."""
    ours = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
    # One process sends as much as a small machine serves; the default, ten, takes the processor from the server beside it.
    return {**ours, **quiet, "NO_PROXY": "*", "no_proxy": "*", "GUIDELLM__MAX_WORKER_PROCESSES": "1", KEY: key}


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:500] if lines else "it said nothing"
