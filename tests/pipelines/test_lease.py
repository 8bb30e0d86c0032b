"""The lease: one holder, dead holders replaced, late ones refused."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipelines import lease as leases
from pipelines.lease import (
    INITIAL_PIDS,
    Lease,
    LeaseLost,
    LeaseTimeout,
    Slots,
    identity,
    is_alive,
    owner_tag,
    same_host,
    tag_is_alive,
)
from stages.storage.bucket import Bucket

HOLD = (
    "import sys, time; from pipelines.lease import Lease; from stages.storage.bucket import Bucket;"
    "Lease.acquire(Bucket(sys.argv[1]), 'f', lambda who: None); print('held', flush=True); time.sleep(60)"
)


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket((tmp_path / "store").as_uri())


def hold_elsewhere(bucket: Bucket) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, bucket.uri], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def acquire(bucket: Bucket, timeout_s: float = 5.0) -> Lease:
    return Lease.acquire(bucket, "f", lambda who: None, timeout_s)


def record(bucket: Bucket, fence: int) -> dict[str, object]:
    found: dict[str, object] = json.loads(bucket.get(f"results/f/{fence:06d}.json") or b"null")
    return found


def test_a_second_holder_waits_and_is_told_who_holds_it(bucket: Bucket) -> None:
    process = hold_elsewhere(bucket)
    heard: list[str] = []
    try:
        with pytest.raises(LeaseTimeout, match=f"process {process.pid} on .* has been making"):
            Lease.acquire(bucket, "f", heard.append, timeout_s=1.5)
        assert heard and str(process.pid) in heard[0]
    finally:
        process.kill()
        process.wait()


def test_a_killed_holder_is_replaced_at_once_with_a_larger_fence(bucket: Bucket) -> None:
    process = hold_elsewhere(bucket)
    process.kill()
    process.wait()
    assert Slots.of(bucket, "f").holder() is not None  # the control: it died holding the lease
    begun = time.monotonic()
    with acquire(bucket) as lease:
        assert time.monotonic() - begun < 1.0
        assert lease.fence == 2
    assert "taken over" in str(record(bucket, 1)["sealed"])
    assert Slots.of(bucket, "f").holder() is None


def test_a_holder_on_another_host_is_replaced_when_its_heart_stopped_and_not_before(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "STALE_AFTER_S", 1.5)
    monkeypatch.setattr(leases, "POLL_S", 0.1)
    bucket.create("results/f/000001.lease.json", json.dumps({"pid": 1, "host": "elsewhere", "fence": 1}).encode())
    beating = threading.Event()

    def beat() -> None:
        for count in range(12):
            bucket.put("results/f/000001.beat", str(count).encode())
            if beating.wait(0.25):
                return

    heart = threading.Thread(target=beat)
    heart.start()
    with pytest.raises(LeaseTimeout):
        acquire(bucket, timeout_s=2.0)  # longer than STALE_AFTER_S, but it beats
    beating.set()
    heart.join()
    with acquire(bucket, timeout_s=4.0) as lease:
        assert lease.fence == 2


def test_who_lost_the_lease_cannot_publish(bucket: Bucket) -> None:
    late = acquire(bucket)
    bucket.create("results/f/000001.json", b'{"sealed": "by the successor"}')
    with acquire(bucket) as successor:
        with pytest.raises(LeaseLost):
            late.commit({"digest": "late"})
        successor.commit({"digest": "ours"})
    late.release()
    assert record(bucket, 2)["digest"] == "ours" and record(bucket, 1)["sealed"] == "by the successor"


def test_the_heartbeat_notices_that_the_lease_is_lost(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.1)
    with acquire(bucket) as lease:
        assert not lease.lost.wait(0.5)
        bucket.create("results/f/000001.json", b'{"sealed": "taken over"}')
        assert lease.lost.wait(2.0)


def test_of_many_that_find_a_dead_holder_one_takes_over(bucket: Bucket) -> None:
    dead = {**identity(), "pid": 2**22 + 1, "started": "never", "fence": 1}
    bucket.create("results/f/000001.lease.json", json.dumps(dead).encode())
    won: list[int] = []

    def take() -> None:
        with contextlib.suppress(LeaseTimeout):
            won.append(Lease.acquire(bucket, "f", lambda who: None, timeout_s=0.3).fence)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [2]


def test_a_holder_that_fails_gives_the_slot_back_at_once(bucket: Bucket) -> None:
    with pytest.raises(RuntimeError), acquire(bucket):
        raise RuntimeError("the stage failed")
    assert record(bucket, 1)["sealed"] == "released without a result"
    with acquire(bucket, timeout_s=0.1) as lease:
        assert lease.fence == 2


def test_a_process_is_told_from_a_later_one_of_its_pid() -> None:
    assert is_alive(identity())
    assert not is_alive({**identity(), "started": "1 after boot other"})


CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
"""Another pid namespace under the same host name."""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace of one's own needs root")
def test_a_holder_in_another_container_of_the_same_name_is_not_taken_for_dead(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen(
        [*CONTAINER, sys.executable, "-c", HOLD, bucket.uri], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        holder = Slots.of(bucket, "f").holder()
        assert holder is not None and holder["host"] == identity()["host"] and holder["pid"] < 100  # the control
        assert not same_host(holder) and not is_alive(holder)
        with pytest.raises(LeaseTimeout, match="another container or boot"):
            acquire(bucket, timeout_s=1.5)
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace of one's own needs root")
def test_a_container_tells_its_own_earlier_process_of_the_same_pid_and_spares_others() -> None:
    """Two processes of pid 2 in one namespace, one after the other, and this one's tag."""
    script = (
        "import sys; from pipelines.lease import owner_tag, tag_is_alive;"
        "print(owner_tag(), *(tag_is_alive(tag) for tag in sys.argv[1:]))"
    )
    again = "echo 1 > /proc/sys/kernel/ns_last_pid"
    shell = f"""{again}; first=$('{sys.executable}' -c "{script}"); {again}
        '{sys.executable}' -c "{script}" "$first" '{owner_tag()}'; echo "$first" """
    said = subprocess.run([*CONTAINER, "bash", "-c", shell], capture_output=True, text=True, check=True, timeout=30)
    second, earlier, other, first = said.stdout.split()
    assert first != second and first.rsplit("-", 1)[0] == second.rsplit("-", 1)[0]  # the control: one pid
    assert earlier == "False" and other == "True", said
    assert tag_is_alive(first)  # it cannot be seen from here


def test_who_can_be_seen_from_here() -> None:
    me = identity()
    assert same_host(me)
    for name in ("host", "machine", "pids"):
        assert not same_host({**me, name: "other"}), name
    # Of another boot: gone for certain outside of containers; inside, an image may give its machine id to many.
    assert same_host({**me, "boot": "00000000"}) is (me["pids"] == INITIAL_PIDS and me["machine"] != "")
    assert not same_host({"pid": me["pid"], "started": me["started"], "host": me["host"]})


def test_a_tag_in_a_file_name_names_one_process() -> None:
    assert tag_is_alive(owner_tag()) and "/" not in owner_tag()
    host, machine, boot, pids, pid, start = owner_tag().rsplit("-", 5)
    assert not tag_is_alive("-".join((host, machine, boot, pids, pid, str(int(start) + 1))))
    assert not tag_is_alive("-".join((host, machine, boot, pids, str(2**22 + 1), start)))
    assert tag_is_alive("-".join(("a-host.with-dots", machine, boot, pids, pid, start)))
    assert tag_is_alive("elsewhere.4242")
