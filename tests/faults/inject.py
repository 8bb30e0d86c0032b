"""Faults on request, in the driver and in its workers: RAYKEEL_FAULTS holds them as JSON. Apart from the stages, because most of them
strike code of ours that runs around a stage. Applied when `tests.faults.stages` is imported, which both kinds of process do.

    die     {"stage", "point", "count", "who"}: SIGKILL when the stage reaches the point for the count-th time. Points: part (that many
            parts are written), sync, upload (so many files are on the disk, in the store). Who: worker, driver, or machine (both)
    hold    {stage: path}: the stage waits until the path exists
    mood    {stage: "stubborn"}: an interrupt does not end its waiting; else it cleans up after itself and goes
    scribe  the state root: when the driver kills itself (RAYKEEL_KILL_AT), its scribe dies first
    host    what this machine is called
    lease   [seconds between heartbeats, until a heart that stands still is dead, between looks]
    clock   path of a file with seconds that are added to the wall clock, read at each look
    quiet   true: nothing is recorded in MLflow, which costs two seconds a process
"""

import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FAULTS: dict[str, Any] = json.loads(os.environ.get("RAYKEEL_FAULTS", "{}"))
_counts: dict[str, int] = {}
_stage = ""


def begin(stage: str, state: Path) -> None:
    """The stage's function was called in this process."""
    global _stage
    _stage = stage
    note(state, f"{stage} begin")
    if (held := FAULTS.get("hold", {}).get(stage)) is not None:
        _hold(stage, state, Path(held), FAULTS.get("mood", {}).get(stage, ""))


def note(state: Path, event: str) -> None:
    """One line of `events.log`: the event, this process, and a clock that all processes share and nobody sets."""
    with (state / "events.log").open("a") as log:
        log.write(f"{event} {os.getpid()} {time.monotonic()}\n")


def reached(point: str) -> None:
    """A point at which the running stage may have to die."""
    die = FAULTS.get("die", {})
    if _stage == "" or (die.get("stage"), die.get("point")) != (_stage, point):
        return
    _counts[point] = _counts.get(point, 0) + 1
    if _counts[point] == die["count"]:
        if die["who"] in ("driver", "machine"):
            os.kill(os.getppid(), signal.SIGKILL)
        if die["who"] == "driver":
            time.sleep(60)  # a worker whose driver is gone ends by itself
        os.kill(os.getpid(), signal.SIGKILL)


def _hold(stage: str, state: Path, until: Path, mood: str) -> None:
    """Wait, with a child process that must not outlive this one."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    with (state / "events.log").open("a") as log:
        log.write(f"{stage} child {child.pid} {time.monotonic()}\n")
    if mood == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    deadline = time.monotonic() + 100
    try:
        while not until.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        if mood != "stubborn":
            child.kill()
            child.wait()
            note(state, f"{stage} cleaned-up")


def _apply() -> None:
    from pipelines import attempt, desk, lease, session, store
    from stages.storage.bucket import Bucket

    if "host" in FAULTS:
        socket.gethostname = lambda: str(FAULTS["host"])
    if "lease" in FAULTS:
        lease.HEARTBEAT_S, lease.STALE_AFTER_S, lease.POLL_S = FAULTS["lease"]
    if "clock" in FAULTS:
        _shift(Path(FAULTS["clock"]), store)
    if "scribe" in FAULTS:
        die_if_asked = attempt.die_if_asked

        def die_together(stage: str, point: str) -> None:
            if os.environ.get("RAYKEEL_KILL_AT") == f"{stage}:{point}":
                for one in desk.running(Path(FAULTS["scribe"])):
                    os.kill(one["pid"], signal.SIGKILL)
            die_if_asked(stage, point)

        attempt.die_if_asked = die_together
    if FAULTS.get("quiet"):
        session.Session.tracking = lambda self, experiment: _Quiet()  # type: ignore[assignment, method-assign]
    fsync, upload = store.fsync, Bucket.upload

    def synced(path: Path) -> None:
        fsync(path)
        reached("sync")

    def uploaded(self: Bucket, directory: Path, names: Iterable[str], prefix: str) -> None:
        for name in names:
            upload(self, directory, [name], prefix)
            reached("upload")

    if "die" in FAULTS:
        store.fsync = synced
        Bucket.upload = uploaded  # type: ignore[method-assign]


def _shift(by: Path, store: Any) -> None:
    real = time.time

    def shifted() -> float:
        return real() + float(by.read_text())

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Shifted":
            return cls.fromtimestamp(shifted(), tz)

    time.time = shifted
    store.datetime = Shifted


class _Quiet:
    """A tracking store that forgets."""

    uri, client, run_id, failed = "sqlite:///nowhere", None, "unrecorded", None

    def start_parent(self, *_: Any) -> "_Quiet":
        return self

    start_child = registry = start_parent

    def _forget(self, *_: Any, **__: Any) -> None: ...

    log_params = log_text = log_metrics = log_dataset = set_tags = close = _forget


_apply()
