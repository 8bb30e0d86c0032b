"""What is kept and what goes, on a directory and on an object store, with a real registry and a real ledger."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines import gc, pins, turns
from pipelines.console import Console
from pipelines.inventory import Inventory
from pipelines.lease import Lease, identity, owner_tag
from pipelines.store import Record, Store
from pipelines.turns import Turns
from stages.contract import ResourcesUnavailable
from tests.pipelines.stored import World


def collect(world: World) -> gc.Plan:
    found = gc.plan(world.app, world.store)
    gc.sweep(found)
    return found


def life(world: World, value: str) -> list[Record]:
    """data -> model -> report -> approval -> version."""
    data = world.result("tokenize", f"data {value}")
    model = world.result("train", f"model {value}", data)
    report = world.result("evaluate", f"report {value}", model, data)
    approval = world.result("gate", f"approval {value}", report, model)
    return [data, model, report, approval, world.result("register", f"version {value}", approval, model)]


def test_a_champion_keeps_its_data_report_and_approval_and_the_rest_goes(world: World) -> None:
    champion, forgotten = life(world, "a"), life(world, "b")
    world.version("lm", champion[1], "champion")
    world.version("lm", forgotten[1])
    found = collect(world)
    assert world.objects() == {r.digest for r in champion}
    assert all(found.kept[r.digest] == ["alias lm@champion (version 1)"] for r in champion)
    for record in champion:
        assert world.store.find(record.fingerprint)[0] == record
    for record in forgotten:
        assert world.store.find(record.fingerprint) == (None, None)
    assert gc.plan(world.app, world.store).doomed == []


def test_fences_never_go_down(world: World) -> None:
    first = world.result("train", "x")
    second = world.result("train", "x", files={"more": b"other bytes"})
    assert (first.fence, second.fence) == (1, 2)
    collect(world)
    assert world.objects() == set()
    assert world.result("train", "x").fence == 3
    # The late writer of a slot that is gone cannot make its result the one that is found.
    assert world.store.find(first.fingerprint)[0].fence == 3


def test_no_older_result_is_revived_when_the_newest_goes(world: World) -> None:
    """The last one counts: what was superseded does not become the hit, though something keeps its object."""
    first = world.result("train", "x")
    world.result("train", "x", files={"more": b"other bytes"})
    world.version("lm", first, "champion")
    collect(world)
    assert world.objects() == {first.digest}
    assert world.store.find(first.fingerprint) == (None, None)
    assert Inventory.of(world.store).newest(first.fingerprint) is None
    assert world.result("train", "x").fence == 3


def test_a_superseded_result_goes_and_the_newest_stays(world: World) -> None:
    old = world.result("train", "x")
    new = world.result("train", "x", files={"more": b"other bytes"})
    world.run(new)
    collect(world)
    assert world.objects() == {new.digest} != {old.digest}
    assert world.store.find(new.fingerprint)[0] == new


def test_the_last_runs_of_each_pipeline_are_kept_and_a_sweep_is_one_run(world: World) -> None:
    old, kept, other = (world.result("make", value) for value in ("old", "kept", "other"))
    points = [world.result("make", f"point {n}") for n in range(3)]
    world.run(old)
    forgotten = world.run(kept)
    for point in points:
        world.run(point, sweep="sweep-1", pipeline="swept")
    world.run(other, pipeline="another")
    world.app.store.keep_runs = 1
    collect(world)
    assert world.objects() == {kept.digest, other.digest, *(p.digest for p in points)}
    assert [run["id"] for run in world.store.runs("stub")] == [forgotten]


def test_a_pinned_run_and_a_pinned_model_stay_until_they_are_unpinned(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made, last = (world.result("train", value) for value in ("model", "made", "last"))
    world.version("lm", model, "candidate")
    run = world.run(made)
    world.run(last)
    for what in ("models:/lm@candidate", run):
        monkeypatch.setenv("WHAT", what)
        assert pins.pin(Console(), world.overrides, None) == 0
    world.client.delete_registered_model_alias("lm", "candidate")
    found = collect(world)
    assert world.objects() == {model.digest, made.digest, last.digest}
    assert any(label.startswith("pin lm-1 (") for label in found.kept[model.digest])
    for what in ("lm-1", run):
        monkeypatch.setenv("WHAT", what)
        assert pins.unpin(Console(), world.overrides, None) == 0
    collect(world)
    assert world.objects() == {last.digest}


def test_a_run_that_goes_on_keeps_what_it_reuses_made_and_will_resume(world: World) -> None:
    reused, newer = world.result("make", "reused"), world.result("make", "newer")
    making = "a" * 64
    world.run(reused, status=None)
    world.store.note_run("stub", world.store.runs("stub")[0]["id"], {"steps": {
        "make": {"fingerprint": reused.fingerprint, "digest": reused.digest},
        "train": {"fingerprint": making, "digest": None},
    }})  # fmt: skip
    for _ in range(3):
        world.run(newer)
    (world.store.work(making) / "checkpoint").mkdir(parents=True)
    found = collect(world)
    assert world.objects() == {reused.digest, newer.digest}
    assert world.store.work(making).exists()
    assert "still running" in found.kept[reused.digest][0]


def test_a_killed_run_is_one_of_the_last_runs_and_its_work_stays_until_newer_ones_came(world: World) -> None:
    dead = {**identity(), "pid": 2**22 + 1}
    made = world.result("make", "made")
    half = "b" * 64
    steps = {
        "make": {"fingerprint": made.fingerprint, "digest": made.digest},
        "train": {"fingerprint": half, "digest": None},
    }
    world.run(made, status=None, owner=dead)
    world.store.note_run("stub", world.store.runs("stub")[0]["id"], {"steps": steps})
    world.store.work(half).mkdir(parents=True)
    collect(world)
    assert world.objects() == {made.digest} and world.store.work(half).exists()
    newer = world.result("make", "newer")
    world.run(newer)
    collect(world)
    assert world.objects() == {newer.digest} and not world.store.work(half).exists()


def test_runs_of_a_tracking_store_out_of_sight_are_kept(world: World, tmp_path: Path) -> None:
    theirs = [world.result("train", f"theirs {n}") for n in range(2)]
    gone = world.result("train", "their directory was removed")
    elsewhere = tmp_path / "other.db"
    elsewhere.touch()
    for record in theirs:
        world.run(record, tracking=f"{socket.gethostname()}:{elsewhere}")
    world.run(gone, tracking=f"{socket.gethostname()}:{tmp_path / 'removed.db'}")
    for _ in range(2):
        world.run(world.result("train", "ours"))
    collect(world)
    assert {r.digest for r in theirs} <= world.objects() and gone.digest not in world.objects()


def test_no_result_goes_while_anything_is_being_made(world: World) -> None:
    """Whoever makes a result may come to bytes that are there already, with a record or without."""
    old = world.result("make", "equal bytes")
    staged = world.store.staging_directory("c" * 64)
    staged.mkdir(parents=True)
    (staged / "data").write_bytes(b"deposited, not yet published")
    orphan = world.store.deposit(staged).digest
    with Lease.acquire(world.store.bucket, "d" * 64, lambda who: None, 1.0) as lease:
        assert any("may come to the same bytes" in note for note in collect(world).notes)
        assert world.objects() == {orphan, old.digest} and world.store.find(old.fingerprint)[0] == old
        (again := world.store.staging_directory("d" * 64)).mkdir()
        (again / "data.bin").write_bytes(b"equal bytes")
        fresh = world.store.publish(world.store.deposit(again), "d" * 64, {}, {}, lease)
        assert fresh.digest == old.digest
    assert world.store.find("d" * 64)[0] == fresh
    collect(world)
    assert world.objects() == set()


def apply(world: World, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
    """`make gc APPLY=1`, with something done between its look and its removals."""
    sweep = gc.sweep

    def late(*arguments: Any) -> None:
        meanwhile()
        sweep(*arguments)

    monkeypatch.setattr(gc, "sweep", late)
    monkeypatch.setenv("APPLY", "1")
    assert gc.gc(Console(), world.overrides, None) == 0


def test_a_result_of_equal_bytes_that_is_made_between_look_and_removal_is_whole(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = world.result("make", "equal bytes")
    made, told = [], []

    def make() -> None:
        with Lease.acquire(world.store.bucket, "d" * 64, lambda who: None, 1.0) as lease:
            Turns(world.store, 30.0).wait(told.append)
            staged = world.store.staging_directory("d" * 64)
            staged.mkdir(parents=True)
            (staged / "data.bin").write_bytes(b"equal bytes")
            made.append(world.store.publish(world.store.deposit(staged), "d" * 64, {}, {}, lease))

    run = threading.Thread(target=make)

    def meanwhile() -> None:
        run.start()
        deadline = time.monotonic() + 10
        while not told and run.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert told and not made  # it waits for whoever removes

    apply(world, monkeypatch, meanwhile)
    run.join(30)
    assert made[0].digest == old.digest
    assert world.store.find("d" * 64) == (made[0], None) and world.store.find(old.fingerprint) == (None, None)
    world.store.verify(old.digest, deep=True)


def test_a_run_whose_plan_is_older_than_the_collection_finds_out_after_its_entry(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It planned to reuse, and says so in the ledger only when the look is over."""
    wanted = world.result("make", "wanted")
    found: list[Record | None] = []
    waits = threading.Event()

    def reuse() -> None:
        world.run(wanted, status=None)
        Turns(world.store, 30.0).wait(lambda who: waits.set())
        found.append(world.store.find(wanted.fingerprint)[0])

    run = threading.Thread(target=reuse)

    def meanwhile() -> None:
        run.start()
        assert waits.wait(10)

    apply(world, monkeypatch, meanwhile)
    run.join(30)
    assert found == [None]


def test_two_collections_take_turns_and_one_that_slept_removes_nothing_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    with (
        pytest.raises(ResourcesUnavailable, match="stood still"),
        Turns(world.store, 1.0).removing(told.append) as check,
    ):
        check()
        with pytest.raises(ResourcesUnavailable, match="has been at make gc in this store for more than 1 s"):
            Turns(world.store, 1.0).wait(told.append)
        for slot in Inventory.of(Store(f"{world.store.root}/turns", world.store.scratch)).all_slots():
            world.store.bucket.create(f"turns/{slot.key}", b'{"sealed": "taken over"}')
        monkeypatch.setattr(turns, "DOUBT_S", 0.0)
        check()
    assert told and set(told) == {f"process {os.getpid()} on {socket.gethostname()}"}
    with Turns(world.store, 1.0).removing(told.append) as check:  # and leaves no trail of old turns
        check()
        assert len(world.store.bucket.entries("turns")) == 1


def test_the_live_endpoints_model_stays(world: World) -> None:
    served = world.result("train", "served")
    record = {"model": "lm", "version": 4, "digest": served.digest}
    (world.app.state_root / "endpoint.json").write_text(json.dumps(record))
    found = collect(world)
    assert found.kept == {served.digest: ["endpoint lm@4"]}


def test_a_registry_that_cannot_be_read_stops_everything(world: World) -> None:
    from pipelines.config import TrackingConfig, TrackingMode

    kept = world.result("train", "kept")
    world.app.tracking = TrackingConfig(mode=TrackingMode.server, uri="http://127.0.0.1:9", timeout_s=2.0)
    with pytest.raises(ResourcesUnavailable):
        gc.plan(world.app, world.store)
    assert world.objects() == {kept.digest}


def test_staging_and_work_of_dead_processes_go_and_those_of_live_ones_stay(world: World) -> None:
    staging = world.store.scratch / "staging"
    gone = subprocess.run(
        [sys.executable, "-c", "from pipelines.lease import owner_tag; print(owner_tag())"],
        capture_output=True,
        text=True,
        check=True,
    )
    dead = staging / f"{'e' * 16}.{gone.stdout.strip()}.abcd1234"
    alive = staging / f"{'e' * 16}.{owner_tag()}.abcd1234"
    for path in (dead, alive, world.store.work("f" * 64), world.store.work("9" * 64 + "-12345678")):
        path.mkdir(parents=True)
    with Lease.acquire(world.store.bucket, "f" * 64, lambda who: None, 1.0):
        collect(world)
    assert {p.name for p in staging.iterdir()} == {alive.name}
    assert {p.name for p in (world.store.scratch / "work").iterdir()} == {"f" * 64}


def test_quarantine_goes_when_it_is_old_enough(world: World) -> None:
    world.store.bucket.put("quarantine/one/record.json", b"{}")
    collect(world)
    assert world.store.bucket.children("quarantine") == ["one"]
    world.app.store.keep_quarantine_days = 0.0
    time.sleep(1.1)  # an object store's clock counts seconds
    collect(world)
    assert world.store.bucket.children("quarantine") == []


def test_the_command_shows_first_and_removes_on_request(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = world.result("train", "x" * 5000)
    assert gc.gc(Console(), world.overrides, None) == 0
    said = capsys.readouterr().out
    assert "nothing was: make gc APPLY=1" in said and gone.digest[:24] in said and "train, made 2026-11-30" in said
    assert world.objects() == {gone.digest}
    monkeypatch.setenv("APPLY", "1")
    assert gc.gc(Console(), world.overrides, None) == 0
    assert world.objects() == set()


def test_a_kill_during_collection_leaves_nothing_that_lies(fresh_mlflow: Path, tmp_path: Path) -> None:
    """Killed at the first removal of bytes: no record names what is gone, and the next collection finishes."""
    world = World.make(fresh_mlflow, tmp_path / "state", keep_runs=0)
    for n in range(4):
        world.result("train", f"model {n}", files={f"part-{m}": b"x" * 1000 for m in range(20)})
    script = (
        "import os, sys; from pipelines import gc; from pipelines.config import AppConfig; from pipelines.store import Store\n"
        "app = AppConfig(name='stub', state=sys.argv[1]); app.store.keep_runs = 0; store = Store.open(app)\n"
        "delete, count = store.bucket.delete, []\n"
        "def dying(keys):\n"
        "    for key in keys:\n"
        "        delete([key]); count.append(key)\n"
        "        if key.startswith('objects/') and len(count) > 30: os.kill(os.getpid(), 9)\n"
        "store.bucket.delete = dying\n"
        "gc.sweep(gc.plan(app, store))"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(world.app.state_root)], timeout=60)
    assert killed.returncode == -9
    assert len(world.store.bucket.entries("objects")) > 0  # the control: it was killed in the middle
    assert list(world.store.records()) == []
    collect(world)
    assert world.objects() == set()
