"""What `make doctor` tries for real: Ray, the tracking store, the artifact store. Apart from the machine's facts, because each of these may
hang or crash, and must leave nothing.
"""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from pipelines import cluster, desk
from pipelines.config import ROOT, AppConfig, ClusterConfig, ClusterMode, redacted
from pipelines.machine import Line, ok
from pipelines.registry import fetch, tracking_uri
from pipelines.store import Store
from stages.contract import ResourcesUnavailable
from stages.storage.bucket import BucketError

RAY_LIMIT_S = 60.0
"""From nothing to an answered task takes 12 s on two idle cores."""
ASK_S = 20.0
TINY_HEAD = {"num_cpus": 1, "object_store_mb": 80}
SKEW_S = 60.0
"""Object stores refuse signatures of a clock that is off by 15 minutes."""


def ray(app: AppConfig) -> Line:
    """One task, on the attached cluster, on the head that runs, or on a tiny one that is started for it."""
    running = cluster.running_head(app.state_root)
    attached = app.cluster.mode is ClusterMode.attach
    with tempfile.TemporaryDirectory(prefix="rk-d-") as place:
        # A state root of its own: starting a head forgets what was served from the one before.
        state = app.state_root if running and not attached else Path(place)
        asked = {"state": str(state), "address": app.cluster.address, "running": bool(running)}
        command = [sys.executable, "-m", "pipelines.services", json.dumps(asked)]
        begun = time.monotonic()
        asking = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        try:
            answer = (asking.communicate(timeout=RAY_LIMIT_S)[0].splitlines() or [""])[-1]
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(asking.pid, signal.SIGKILL)  # its head sees that its owner is gone, and ends
            asking.communicate()
            answer = f"no answer within {RAY_LIMIT_S:.0f} s"
    seconds = time.monotonic() - begun
    where = (
        f"the cluster at {app.cluster.address}"
        if attached
        else "the running head"
        if running
        else "a head started for it"
    )
    if answer == "answered":
        return ok(f"{where} answered a task in {seconds:.0f} s")
    return Line(
        "problem",
        f"{where}: {answer or 'its process died'}",
        "logs are under the state directory (logs/ray, logs/head.log)",
    )


def _ask_ray(state: Path, address: str | None, running: bool) -> str:
    """In a process of its own: a Ray that hangs or crashes is a finding, not the end of the doctor."""
    if address:
        cfg = ClusterConfig(mode=ClusterMode.attach, address=address, connect_timeout_s=ASK_S)
    else:
        mode = ClusterMode.local if running else ClusterMode.ephemeral
        cfg = ClusterConfig(mode=mode, **TINY_HEAD)  # type: ignore[arg-type]
    try:
        with cluster.connect(cfg, state):
            import ray as library

            answer = library.remote(num_cpus=0.1)(lambda: "answered").remote()
            return str(library.get(answer, timeout=ASK_S))
    except ResourcesUnavailable as error:
        return str(error).replace("\n", " ")


def tracking(app: AppConfig) -> Line:
    """The server's health, or a write lock on the SQLite file."""
    uri = tracking_uri(app.tracking.uri, app.state_root)
    pids = ", ".join(str(one["pid"]) for one in desk.running(app.state_root))
    kept = f"; kept open by process {pids}" if pids else ""
    begun = time.monotonic()
    if uri.startswith("http"):
        try:
            fetch(f"{uri.rstrip('/')}/health", app.tracking.timeout_s)
        except OSError as error:
            return Line(
                "problem", f"{redacted(uri)}: {redacted(str(error))}", "start the server, or use tracking=local"
            )
        return ok(f"{redacted(uri)} answers in {1000 * (time.monotonic() - begun):.0f} ms{kept}")
    path = Path(uri.removeprefix("sqlite:///"))
    if not path.exists():
        return ok(f"no MLflow store yet; the first run makes {path}")
    try:
        connection = sqlite3.connect(path, timeout=ASK_S / 2, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
            connection.execute("ROLLBACK")
        finally:
            connection.close()
    except sqlite3.Error as error:
        return Line(
            "problem", f"{path}: {error}", "end the process that holds it; a full or read-only disk gives this too"
        )
    return ok(f"{path}: {tables} tables, takes a write in {1000 * (time.monotonic() - begun):.0f} ms{kept}")


def store(app: AppConfig) -> Line:
    """Put, get, create-if-absent, delete, timed."""
    opened = Store.open(app)
    bucket, made = opened.bucket, _missing_parents(opened.bucket.directory)
    key, data = f".doctor-{uuid.uuid4().hex}", uuid.uuid4().bytes
    try:
        begun = time.monotonic()
        bucket.put(f"{key}/blob", data)
        if bucket.get(f"{key}/blob") != data:
            return Line("problem", f"{opened.root}: gives other bytes back than it was given", "use another store")
        each = 1000 * (time.monotonic() - begun) / 2
        skew = time.time() - bucket.entries(key)[0].modified
        broken = bucket.probe() if not bucket.single_writer else None
    except BucketError as error:
        return Line("problem", str(error), "see store.root, and the credentials in the environment for an object store")
    finally:
        with contextlib.suppress(BucketError):
            bucket.delete([f"{key}/blob"])
        for directory in made:
            with contextlib.suppress(OSError):
                directory.rmdir()
    said = f"{opened.root}: put and get in {each:.1f} ms"
    if broken:
        return Line(
            "problem",
            f"{said}, but {broken}",
            "two runs could publish over each other: use another store, or store.single_writer=true",
        )
    if abs(skew) > SKEW_S:
        return Line("warning", f"{said}; its clock differs by {skew:.0f} s", "set this machine's clock")
    return ok(said + (", one writer only as declared" if bucket.single_writer else ", create-if-absent kept"))


def _missing_parents(directory: Path | None) -> list[Path]:
    """The directories that using a store would make, innermost first."""
    return [p for p in (directory, *directory.parents) if not p.exists()] if directory else []


if __name__ == "__main__":
    cluster.quiet()
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    said = _ask_ray(Path(arguments["state"]), arguments["address"], arguments["running"])
    sys.stdout.write(f"\n{said}\n")
