"""The store on a directory and on an object store: the same promises from the same code."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from pipelines.lease import Lease, LeaseLost
from pipelines.mistakes import ConfigError
from pipelines.store import IntegrityError, Record, Store
from stages.artifacts import DamagedArtifact, Rows
from stages.storage import bucket as buckets
from stages.storage.bucket import Bucket, BucketError
from stages.storage.hashing import sha256_file, tree_digest
from tests.services import Service


@pytest.fixture(params=["directory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Root URI of an empty store of each kind."""
    if request.param == "directory":
        return (tmp_path / "store").as_uri()
    server: Service = request.getfixturevalue("s3")
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAYKEEL_CACHE", str(tmp_path / "cache"))
    return f"s3://store/{uuid.uuid4().hex}"


@pytest.fixture
def store(root: str, tmp_path: Path) -> Store:
    return open_store(root, tmp_path)


def open_store(root: str, tmp_path: Path) -> Store:
    scratch = tmp_path / ("store" if root.startswith("file") else "scratch")
    opened = Store(root, scratch)
    opened.prepare()
    return opened


def stage_files(store: Store, value: str = "7") -> Path:
    staged = store.staging_directory("f" * 64)
    (staged / "rows").mkdir(parents=True)
    (staged / "rows" / "part-00000.parquet").write_text(value)
    Rows.write(staged, {"value": value})
    return staged


def publish(store: Store, value: str = "7", fingerprint: str = "f" * 64) -> Record:
    with Lease.acquire(store.bucket, fingerprint, lambda who: None, 1.0) as lease:
        return store.publish(store.deposit(stage_files(store, value)), fingerprint, {"seed": 1}, {"seconds": 1}, lease)


def test_what_was_published_is_found_and_read_back(store: Store) -> None:
    made = publish(store)
    found, broken = store.find("f" * 64)
    assert found == made and broken is None
    directory = Rows(uri=store.object_uri(made.digest), digest=made.digest).local()
    assert (directory / "rows" / "part-00000.parquet").read_text() == "7"
    # The digest is what sha256 says of the tree, computed here from the files.
    listed = {n: sha256_file(directory / n) for n in ("rows/part-00000.parquet", "summary.json")}
    assert tree_digest(listed) == made.digest
    assert list((store.scratch / "staging").iterdir()) == []
    assert store.find("0" * 64) == (None, None)


def test_the_newest_fence_wins_and_the_older_object_stays(store: Store) -> None:
    old, new = publish(store, "1"), publish(store, "2")
    found, _ = store.find("f" * 64)
    assert found == new and (old.fence, new.fence) == (1, 2)
    store.verify(old.digest, deep=True)


def test_equal_content_is_one_object(store: Store) -> None:
    assert publish(store, "1", "a" * 64).digest == publish(store, "1", "b" * 64).digest
    assert len(store.bucket.children("objects")) == 1
    assert {record.fingerprint for record in store.records()} == {"a" * 64, "b" * 64}


def test_a_late_holder_deposits_but_cannot_publish(store: Store) -> None:
    late = Lease.acquire(store.bucket, "f" * 64, lambda who: None, 1.0)
    deposit = store.deposit(stage_files(store, "late"))
    store.bucket.create(f"results/{'f' * 64}/000001.json", b'{"sealed": "by its successor"}')
    publish(store, "ours")
    with pytest.raises(LeaseLost):
        store.publish(deposit, "f" * 64, {}, {}, late)
    late.release()
    found, _ = store.find("f" * 64)
    assert found is not None and found.fence == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "delete", "swap"])
def test_a_damaged_object_is_no_hit_and_names_the_file(store: Store, damage: str) -> None:
    record = publish(store)
    place = f"objects/{record.digest}"
    data, other = f"{place}/rows/part-00000.parquet", f"{place}/summary.json"
    if damage == "delete":
        store.bucket.delete([data])
    elif damage == "swap":
        one, two = store.bucket.get(data), store.bucket.get(other)
        store.bucket.put(data, two or b"")
        store.bucket.put(other, one or b"")
    else:
        store.bucket.put(data, {"flip": b"8", "cut": b"", "empty": b""}[damage])
    found, broken = store.find("f" * 64)
    assert found is None and broken is not None and ("part-00000.parquet" in broken or "summary.json" in broken)
    place = store.set_aside("f" * 64)
    assert store.find("f" * 64) == (None, None)
    assert store.bucket.get(place.removeprefix(f"{store.root}/") + "/record.json")
    again = publish(store)
    assert again.digest == record.digest and again.fence == 2
    store.verify(again.digest, deep=True)


def test_a_machine_that_never_hashed_a_blob_hashes_it_before_it_is_read(
    tmp_path: Path, s3: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**s3.env, "RAYKEEL_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    root = f"s3://store/{uuid.uuid4().hex}"
    record = publish(open_store(root, tmp_path / "one"))
    other = open_store(root, tmp_path / "two")
    other.bucket.put(f"objects/{record.digest}/rows/part-00000.parquet", b"8")
    assert other.find("f" * 64)[0] is not None  # an object store gives no cheap proof of bytes
    with pytest.raises(DamagedArtifact, match=r"part-00000\.parquet: its bytes changed"):
        Rows(uri=other.object_uri(record.digest)).local()
    with pytest.raises(IntegrityError, match=r"part-00000\.parquet"):
        other.verify(record.digest, deep=True)
    assert other.find("f" * 64)[0] is None  # known from now on


def test_what_was_set_aside_revives_no_older_result_and_is_set_aside_once(store: Store) -> None:
    publish(store, "1")
    last = publish(store, "2")
    place = store.set_aside("f" * 64, last.fence)
    assert store.find("f" * 64) == (None, None)  # the older one is not the last
    assert store.set_aside("f" * 64, last.fence) == place  # whoever comes second
    assert len(store.bucket.children("quarantine")) == 1


def test_a_commit_whose_answer_was_lost_is_ours(store: Store) -> None:
    with Lease.acquire(store.bucket, "f" * 64, lambda who: None, 1.0) as lease:
        first = store.publish(store.deposit(stage_files(store, "1")), "f" * 64, {}, {"run_id": "a"}, lease)
        again = store.publish(store.deposit(stage_files(store, "2")), "f" * 64, {}, {"run_id": "b"}, lease)
    assert again == first and store.find("f" * 64)[0] == first


def test_what_was_removed_before_its_record_is_not_published(store: Store) -> None:
    with Lease.acquire(store.bucket, "f" * 64, lambda who: None, 1.0) as lease:
        deposit = store.deposit(stage_files(store))
        store.bucket.delete([f"objects/{deposit.digest}/rows/part-00000.parquet"])
        with pytest.raises(IntegrityError, match=r"part-00000\.parquet: the file is gone: it was removed before"):
            store.publish(deposit, "f" * 64, {}, {}, lease)
    assert store.find("f" * 64) == (None, None)


def test_an_upload_that_was_cut_is_completed_by_the_next_and_disturbs_no_other(store: Store) -> None:
    digest = store.deposit(stage_files(store)).digest
    store.bucket.delete([f"objects/{digest}/MANIFEST.json", f"objects/{digest}/summary.json"])
    assert store.deposit(stage_files(store)).digest == digest
    store.verify(digest, deep=True)


def test_strange_names_among_the_slots_are_nobodys_business(store: Store) -> None:
    record = publish(store)
    store.bucket.put(f"results/{'f' * 64}/.DS_Store", b"x")
    assert store.find("f" * 64)[0] == record


def test_a_blob_larger_than_one_request_is_read_in_ranges(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "PIECE", 1000)
    bucket = Bucket(root)
    data = bytes(range(256)) * 40
    bucket.put("large", data)
    bucket.download("large", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data and b"".join(map(bytes, bucket.chunks("large"))) == data


def test_a_manifest_that_is_not_the_objects_own_is_not_believed(
    tmp_path: Path, s3: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**s3.env, "RAYKEEL_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    store = open_store(f"s3://store/{uuid.uuid4().hex}", tmp_path)
    one, two = publish(store, "1", "a" * 64), publish(store, "2", "b" * 64)
    other = store.bucket.get(f"objects/{two.digest}/MANIFEST.json")
    for data, words in ((other, "does not belong"), (b"{", "unreadable"), (b"[]", "unreadable")):
        store.bucket.put(f"objects/{one.digest}/MANIFEST.json", data or b"")
        with pytest.raises(DamagedArtifact, match=words):
            Rows(uri=store.object_uri(one.digest)).local()


def test_an_object_store_that_is_away_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "PATIENCE_S", 0.3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("RAYKEEL_CACHE", str(tmp_path))
    with pytest.raises(BucketError, match="cannot read"):
        Bucket("s3://store/x", patience_s=0.3).get("k")


def test_a_touched_mtime_is_still_a_hit(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri(), tmp_path)
    directory = store.object_directory(publish(store).digest)
    assert directory is not None
    os.utime(directory / "rows" / "part-00000.parquet", (1, 1))
    assert store.find("f" * 64)[0] is not None


def test_an_unreadable_record_is_named_and_can_be_set_aside(store: Store) -> None:
    publish(store)
    store.bucket.put(f"results/{'f' * 64}/000001.json", b"{")
    found, broken = store.find("f" * 64)
    assert found is None and "000001.json: unreadable record" in str(broken)
    store.set_aside("f" * 64)
    assert publish(store).fence == 2


KILLED = """
import os, sys
from pathlib import Path
from pipelines.lease import Lease
from pipelines.store import Store
from stages.storage.bucket import Bucket
from tests.pipelines import test_store as t

root, place, moment = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
def die(): os.kill(os.getpid(), 9)
place_object, create = Store._place, Bucket.create
def placing(self, staged, digest, names):
    if moment == "before the object": die()
    place_object(self, staged, digest, names)
    if moment == "after the object": die()
def creating(self, key, data):
    record = key.endswith("000001.json")
    if record and moment == "before the record": die()
    made = create(self, key, data)
    if record and moment == "after the record": die()
    return made
Store._place, Bucket.create = placing, creating
t.publish(t.open_store(root, place))
"""


@pytest.mark.parametrize("moment", ["before the object", "after the object", "before the record", "after the record"])
def test_a_kill_at_any_moment_of_publication_leaves_all_or_nothing(root: str, tmp_path: Path, moment: str) -> None:
    command = [sys.executable, "-c", KILLED, root, str(tmp_path), moment]
    killed = subprocess.run(command, capture_output=True, timeout=60)
    assert killed.returncode == -9, killed.stderr  # the control: it did die there
    store = open_store(root, tmp_path)
    found, broken = store.find("f" * 64)
    assert broken is None and (found is not None) == (moment == "after the record")
    again = publish(store)
    assert again.fence == 2
    assert store.bucket.children("objects") == [again.digest]
    store.verify(again.digest, deep=True)
    store.sweep_staging()
    assert list((store.scratch / "staging").iterdir()) == []


def test_two_writers_of_one_key_and_one_wins(root: str) -> None:
    bucket = Bucket(root)
    bucket.prepare()
    assert bucket.probe() is None
    assert bucket.create("k", b"first") and not bucket.create("k", b"second")
    assert bucket.create("k", b"first")  # the same request again: its first answer was lost
    assert bucket.get("k") == b"first" and bucket.entries("none") == [] and bucket.get("none") is None


class Forgetful(Bucket):
    """A backend whose create replaces, as that of many object stores did."""

    def create(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


def test_a_backend_without_create_if_absent_is_refused_unless_it_has_a_single_writer(tmp_path: Path) -> None:
    uri = (tmp_path / "store").as_uri()
    store = Store(uri, tmp_path / "store")
    store.bucket = Forgetful(uri)
    with pytest.raises(ConfigError, match=r"does not keep create-if-absent \(.*store\.single_writer=true"):
        store.prepare()
    declared = Store(uri, tmp_path / "store", single_writer=True)
    declared.prepare()
    assert publish(declared).fence == 1 and declared.find("f" * 64)[0] is not None


@pytest.mark.parametrize(
    ("uri", "words"),
    [("ftp://host/x", "want a directory or one of s3://"), ("s3://missing-bucket/x", "cannot be written")],
)
def test_a_root_that_cannot_be_is_named(
    uri: str, words: str, tmp_path: Path, s3: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        Store(uri, tmp_path / "scratch").prepare()


def test_reading_a_store_that_is_not_there_makes_nothing(tmp_path: Path) -> None:
    store = Store((tmp_path / "none").as_uri(), tmp_path / "none")
    assert store.find("f" * 64) == (None, None) and list(store.records()) == [] and store.runs() == []
    assert not (tmp_path / "none").exists()


def test_the_ledger_keeps_what_a_run_needs(store: Store) -> None:
    run = store.begin_run("quickstart", {"command": "make run"})
    (open_run,) = store.runs("quickstart")
    assert open_run["ended"] is False and open_run["owner"]["pid"] == os.getpid()
    store.end_run("quickstart", run, {"status": "FINISHED", "steps": {"make": "d"}})
    (ended,) = store.runs()
    assert (ended["id"], ended["status"], ended["command"], ended["ended"]) == (run, "FINISHED", "make run", True)


def test_a_copy_that_was_changed_on_the_node_is_fetched_again(
    tmp_path: Path, s3: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**s3.env, "RAYKEEL_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    store = open_store(f"s3://store/{uuid.uuid4().hex}", tmp_path)
    record = publish(store)
    artifact = Rows(uri=store.object_uri(record.digest))
    (artifact.local() / "rows" / "part-00000.parquet").write_text("other")
    assert (artifact.local() / "rows" / "part-00000.parquet").read_text() == "7"


def test_missing_credentials_are_said_in_words(tmp_path: Path) -> None:
    asked = OSError("Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token: 403 Forbidden")
    said = str(Bucket(tmp_path.as_uri())._error("read", "k", asked))
    assert "no credentials: set AWS_ACCESS_KEY_ID" in said and "169" not in said


def test_a_full_disk_keeps_its_errno(tmp_path: Path) -> None:
    error = Bucket(tmp_path.as_uri())._error("write", "k", OSError("Unable to copy (os error 28)"))
    assert isinstance(error, BucketError) and error.errno == 28
