"""The lease: one holder, dead holders replaced, late ones refused."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines import lease as leases
from pipelines.lease import Lease, LeaseLost, LeaseTimeout

HOLD = (
    "import sys, time; from pathlib import Path; from pipelines.lease import Lease;"
    "Lease.acquire(Path(sys.argv[1]), 'f', lambda who: None); print('held', flush=True); time.sleep(60)"
)


def hold_elsewhere(root: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(root)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_holder_waits_and_is_told_who_holds_it(tmp_path: Path) -> None:
    process = hold_elsewhere(tmp_path)
    heard: list[str] = []
    try:
        with pytest.raises(LeaseTimeout, match=f"process {process.pid} on .* has held"):
            Lease.acquire(tmp_path, "f", heard.append, timeout_s=1.5)
        assert heard and str(process.pid) in heard[0]
    finally:
        process.kill()
        process.wait()


def test_a_killed_holder_is_replaced_at_once_with_a_larger_fence(tmp_path: Path) -> None:
    process = hold_elsewhere(tmp_path)
    process.kill()
    process.wait()
    assert (tmp_path / "f.json").exists()  # the control: it died holding the lease
    begun = time.monotonic()
    with Lease.acquire(tmp_path, "f", lambda who: None, timeout_s=5) as lease:
        assert time.monotonic() - begun < 1.0
        assert lease.fence == 2
    assert not (tmp_path / "f.json").exists()


def test_a_holder_on_another_host_is_replaced_when_its_heart_stopped(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text(json.dumps({"pid": 1, "started": 0.0, "host": "elsewhere", "fence": 1}))
    with pytest.raises(LeaseTimeout):
        Lease.acquire(tmp_path, "f", lambda who: None, timeout_s=0.5)
    old = time.time() - leases.STALE_AFTER_S - 1
    os.utime(path, (old, old))
    Lease.acquire(tmp_path, "f", lambda who: None, timeout_s=0.5).release()


def test_who_lost_the_lease_cannot_publish(tmp_path: Path) -> None:
    late = Lease.acquire(tmp_path, "f", lambda who: None)
    late._stop.set()  # a stalled process: no heartbeat, and then it wakes up
    (tmp_path / "f.json").unlink()
    with Lease.acquire(tmp_path, "f", lambda who: None), pytest.raises(LeaseLost), late.fenced():
        raise AssertionError("published with an old fence")
    late.release()
