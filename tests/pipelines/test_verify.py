"""`make verify` and `make status` on real stores with a real registry: what is broken is named by its file, what is sound is not."""

import os
import re
from pathlib import Path

import pytest

from pipelines import status, verify
from pipelines.console import Console
from pipelines.inventory import Inventory
from pipelines.lease import Lease
from pipelines.store import IntegrityError
from stages.artifacts import ArtifactError, Checkpoint
from stages.storage.hashing import sha256_file
from tests.pipelines.stored import World


def run_verify(world: World) -> str | None:
    """What the error says, or None when nothing is broken."""
    try:
        assert verify.verify(Console(), world.overrides, None) == 0
    except IntegrityError as error:
        return str(error)
    return None


def test_a_sound_store_and_registry_have_nothing_broken(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    model = world.result("train", "weights", files={"part-1/a.bin": b"a" * 1000, "ümlaut b.bin": b""})
    world.version("lm", model, "champion")
    assert run_verify(world) is None
    said = capsys.readouterr().out
    assert "1 objects, 3 files, 1.0 kB hashed" in said and "noted" not in said


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "delete", "manifest", "no manifest"])
def test_each_damage_is_named_by_its_file_and_repaired_on_request(
    world: World, damage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sound, victim = world.result("tokenize", "sound"), world.result("train", "0123456789")
    key, bucket = f"objects/{victim.digest}/data.bin", world.store.bucket
    manifest = f"objects/{victim.digest}/MANIFEST.json"
    if damage in ("flip", "cut", "empty"):
        bucket.put(key, {"flip": b"0123456788", "cut": b"01234", "empty": b""}[damage])
    elif damage == "delete":
        bucket.delete([key])
    elif damage == "manifest":
        bucket.put(manifest, b"{}")
    else:
        bucket.delete([manifest])
    assert run_verify(world) == f"{world.store.root}: 1 things are broken; they are listed above"
    said = capsys.readouterr().out
    named = (key if damage in ("flip", "cut", "empty", "delete") else manifest).removeprefix("objects/")
    assert named in said.replace("\n", "") and "train's result" in said and "REPAIR=1" in said
    assert bucket.children("quarantine") == []  # looking changes nothing
    monkeypatch.setenv("REPAIR", "1")
    assert run_verify(world) is not None
    monkeypatch.delenv("REPAIR")
    assert run_verify(world) is None
    assert world.store.find(victim.fingerprint) == (None, None) and world.objects() == {sound.digest}
    assert len(bucket.children("quarantine")) >= 1


CHECKPOINT = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model-00001-of-00002.safetensors": bytes(range(256)) * 256,
    "model-00002-of-00002.safetensors": bytes(reversed(range(256))) * 256,
    "model.safetensors.index.json": b"{}",
    "tokenizer.json": b"{}",
    "golden.json": b"[]",
    "summary.json": b"{ }",
}


@pytest.mark.faults
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "delete"])
def test_every_file_of_a_checkpoint_is_checked_before_it_is_loaded(world: World, damage: str) -> None:
    """By the run's own check; and what comes from an object store is hashed by the node that fetches it."""
    for file in CHECKPOINT:
        made = world.result("train", f"weights {file}", files=CHECKPOINT)
        key, bucket = f"objects/{made.digest}/{file}", world.store.bucket
        data = bytearray(bucket.get(key) or b"")
        data[len(data) // 2] ^= damage == "flip"
        if damage == "delete":
            bucket.delete([key])
        else:
            bucket.put(key, bytes(data[: {"flip": len(data), "cut": -1, "empty": 0}[damage]]))
        record, broken = world.store.find(made.fingerprint)
        assert record is None and broken is not None and file in broken
        if bucket.directory is None:
            with pytest.raises(ArtifactError, match=re.escape(file)):
                Checkpoint(uri=world.store.object_uri(made.digest), digest=made.digest).local()
        world.store.set_aside(made.fingerprint)
        again = world.result("train", f"weights {file}", files=CHECKPOINT)
        assert again.digest == made.digest and world.store.find(made.fingerprint)[0] == again


def test_bits_that_rot_under_an_unchanged_time_are_found(fresh_mlflow: Path, tmp_path: Path) -> None:
    """Size, time and inode are those that a run trusts: only re-hashing sees it."""
    world = World.make(fresh_mlflow, tmp_path / "state")
    victim = world.result("train", "0123456789")
    path = (world.store.object_directory(victim.digest) or tmp_path) / "data.bin"
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"1")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert world.store.find(victim.fingerprint)[0] == victim  # the control: a run's check trusts it
    assert run_verify(world) is not None


def test_the_registry_is_reconciled(fresh_mlflow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import sqlite3

    world = World.make(fresh_mlflow, tmp_path / "state")
    kept, lost = world.result("train", "kept"), world.result("train", "lost")
    world.version("lm", kept, "champion")
    world.version("lm", lost)
    world.version("lm", None)
    world.store.bucket.delete([e.key for e in world.store.bucket.entries(f"objects/{lost.digest}")])
    world.store.bucket.delete([f"results/{lost.fingerprint}/000001.json"])
    assert run_verify(world) is None  # without an alias nobody is misled
    said = capsys.readouterr().out
    assert "lm@2  has no alias, and its weights are gone" in said and "lm@3  no tag `digest`" in said
    world.client.set_registered_model_alias("lm", "previous", "2")
    world.client.set_registered_model_alias("lm", "foreign", "3")
    with sqlite3.connect(world.app.state_root / "mlflow" / "mlflow.db") as db:
        db.execute("INSERT INTO registered_model_aliases (name, alias, version) VALUES ('lm', 'ghost', 9)")
    problem = run_verify(world)
    said = capsys.readouterr().out
    assert problem is not None and "3 things are broken" in problem
    assert "models:/lm@ghost" in said and "version 9 does not exist" in said
    assert "the weights of version 2 are not in this store" in said and "version 3 has no tag" in said


def test_a_receipt_of_a_deleted_version_and_an_orphan_are_noted(
    fresh_mlflow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World.make(fresh_mlflow, tmp_path / "state")
    model = world.result("train", "model")
    number = world.version("lm", model)
    receipt = b'{"name": "lm", "version": 1}'
    world.result("register", "receipt", model, files={"summary.json": receipt})
    staged = world.store.staging_directory("c" * 64)
    staged.mkdir(parents=True)
    (staged / "data").write_bytes(b"of a run that was killed before it published")
    world.store.deposit(staged)
    world.client.delete_model_version("lm", str(number))
    assert run_verify(world) is None
    said = capsys.readouterr().out
    assert (
        "lm@1" in said
        and "deleted from the registry" in said
        and "1 objects" in said
        and "no record names them" in said
    )


@pytest.mark.slow
def test_it_hashes_about_as_fast_as_sha256_itself(fresh_mlflow: Path, tmp_path: Path) -> None:
    import time

    world = World.make(fresh_mlflow, tmp_path / "state")
    block = os.urandom(2**20) * 48
    record = world.result("train", "weights", files={f"model-{n}.safetensors": block + bytes([n]) for n in range(4)})
    directory = world.store.object_directory(record.digest) or tmp_path

    def seconds(of: object) -> float:
        begun = time.perf_counter()
        of()  # type: ignore[operator]
        return time.perf_counter() - begun

    alone = min(seconds(lambda: [sha256_file(p) for p in directory.glob("*.safetensors")]) for _ in range(2))
    everything = Inventory.of(world.store)
    ours = min(seconds(lambda: verify.rehash(world.store, everything, verify.Findings())) for _ in range(2))
    assert ours < 1.5 * alone, f"{ours:.2f} s, sha256 in one thread {alone:.2f} s"


def test_status_shows_stored_registered_running_and_pinned(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    made = world.result("train", "model")
    world.version("lm", made, "champion")
    world.run(made, status="FAILED")
    world.store.note_run("stub", world.store.runs("stub")[0]["id"], {"problem": "rows.jsonl:3: broken"})
    run = world.run(made, status=None, pipeline="other")
    making = "a" * 64
    world.store.note_run("other", run, {"steps": {"clean": {"fingerprint": making, "digest": None}}})
    with Lease.acquire(world.store.bucket, making, lambda who: None, 1.0):
        assert status.status(Console(), world.overrides, None) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"other clean; process {os.getpid()} on " in said
    assert "models:/lm 1 versions; champion = 1" in said
    assert "stub last run 2026-11-30 12:00:00: FAILED (rows.jsonl:3: broken)" in said
    assert "results 1" in said and "objects 1, " in said and "served none" in said and " free " in said
