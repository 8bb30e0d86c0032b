"""The process that holds this project's Ray: `python -m pipelines.keeper STATE CPUS STORE_MB [OWNER]`. Apart, because it outlives
the run that starts it and must know when nobody needs it any more. With an owner (the identity of a process, as JSON) the head is
that process's alone and ends with it.
"""

import json
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from pipelines import cluster
from pipelines.config import ClusterConfig
from pipelines.lease import identity, is_alive

IDLE_EXIT_S = 3.0


def keep(state: Path, num_cpus: int, object_store_mb: int, owner: dict[str, Any] | None) -> None:
    """Start Ray, record it, wait for SIGTERM or until its owner is gone, or else no run and no endpoint needs it."""
    record = cluster.ephemeral_path(state, int(owner["pid"])) if owner else cluster.head_path(state)

    def is_needed() -> bool:
        return is_alive(owner) if owner else cluster.is_needed(state)

    stopping: list[int] = []
    is_up = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.append(number)
        if not is_up.is_set():
            raise SystemExit(128 + number)  # out of Ray's start, which may take half a minute

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the run, not for what serves
    directory = cluster.short_directory()
    try:
        address = cluster.start_here(ClusterConfig(num_cpus=num_cpus, object_store_mb=object_store_mb), directory)
        is_up.set()
        session = str((directory / "r" / "session_latest").resolve())
        head = {**identity(), "address": address, "session": session, "directory": str(directory)}
        fresh = record.with_suffix(".new")
        fresh.write_text(json.dumps(head))
        fresh.replace(record)
        idle_since = time.monotonic()
        while not stopping:
            time.sleep(0.5)
            if is_needed():
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > IDLE_EXIT_S:
                with cluster.alone(state):  # nobody joins a head that is about to end
                    if not is_needed():
                        cluster.forget(state, head)
                        record.unlink(missing_ok=True)
                        break
        cluster.stop_here()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    cluster.quiet()
    keep(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]) if len(sys.argv) > 4 else None)
