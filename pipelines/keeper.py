"""The process that holds this project's Ray: `python -m pipelines.keeper STATE CPUS STORE_MB`. Apart, because it outlives the
run that starts it and must know when nobody needs it any more.
"""

import json
import shutil
import signal
import sys
import time
from pathlib import Path

from pipelines import cluster
from pipelines.config import ClusterConfig
from pipelines.lease import identity

IDLE_EXIT_S = 3.0


def keep(state: Path, num_cpus: int, object_store_mb: int) -> None:
    """Start Ray, record it, wait for SIGTERM or until no run and no endpoint needs it."""
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the run, not for what serves
    directory = cluster.short_directory()
    try:
        address = cluster.start_here(ClusterConfig(num_cpus=num_cpus, object_store_mb=object_store_mb), directory)
        session = str((directory / "r" / "session_latest").resolve())
        head = {**identity(), "address": address, "session": session, "directory": str(directory)}
        fresh = cluster.head_path(state).with_suffix(".new")
        fresh.write_text(json.dumps(head))
        fresh.replace(cluster.head_path(state))
        idle_since = time.monotonic()
        while not stopping:
            time.sleep(0.5)
            if cluster.is_needed(state):
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > IDLE_EXIT_S:
                with cluster.alone(state):  # nobody joins a head that is about to end
                    if not cluster.is_needed(state):
                        cluster.forget(state, head)
                        break
        cluster.stop_here()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    cluster.quiet()
    keep(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
