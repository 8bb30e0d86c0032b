"""`make verify`: re-hashes every stored object and reconciles the store with the model registry. Apart from the runner's own checks, which
look at what a run is about to use and trust a file whose size, time and inode did not change: here every byte is read.

Broken (exit code 6) is what would fail or mislead somebody: bytes that changed, objects that are not whole, records without their object,
aliases that lead nowhere. Only noted is what a later run or `make gc` settles by itself. Nothing is changed, except with REPAIR=1: then
broken results go to quarantine/ and the next run makes them again.
"""

import hashlib
import json
import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pipelines import registered
from pipelines.config import compose
from pipelines.console import Console
from pipelines.inventory import Inventory, shown
from pipelines.registered import Registered
from pipelines.store import IntegrityError, Store
from stages.artifacts import MANIFEST
from stages.contract import ResourcesUnavailable
from stages.storage.bucket import BucketError


@dataclass
class Findings:
    """What a verification found."""

    broken: list[tuple[str, str]] = field(default_factory=list)
    """(where, what is wrong and what to do)."""
    noted: list[tuple[str, str]] = field(default_factory=list)
    objects: set[str] = field(default_factory=set)
    """Digests of the broken objects."""
    bytes: int = 0
    files: int = 0


def verify(console: Console, overrides: list[str], conf: str | None) -> int:
    app = compose(overrides, conf)
    store = Store.open(app)
    begun = time.monotonic()
    everything = Inventory.of(store)
    found = Findings()
    rehash(store, everything, found)
    reconcile_records(store, everything, found)
    try:
        reconcile_registry(store, everything, registered.read(app), found)
    except ResourcesUnavailable as error:
        found.noted.append(("registry", f"not compared: {error}"))
    seconds = time.monotonic() - begun
    rate = found.bytes / max(seconds, 1e-9)
    console.line(
        f"{len(everything.objects)} objects, {found.files} files, {shown(found.bytes)} hashed in {seconds:.1f} s ({shown(rate)}/s)"
    )
    for title, rows in (("noted", found.noted), ("broken", found.broken)):
        if rows:
            console.line(f"{title}:")
            console.table(rows)
    if not found.broken:
        console.line("nothing is broken")
        return 0
    if os.environ.get("REPAIR", "") not in ("", "0"):
        for place in repair(store, everything, found):
            console.line(f"set aside: {place}")
        console.line("make run makes what it needs of this again; make verify looks once more")
    else:
        console.line("make verify REPAIR=1 sets broken results aside, so that the next run makes them again")
    raise IntegrityError(f"{store.root}: {len(found.broken)} things are broken; they are listed above")


def rehash(store: Store, everything: Inventory, found: Findings) -> None:
    """Every file of every object, as many at once as there are cores: hashing releases the interpreter's lock."""
    jobs: list[tuple[str, str, int, str]] = []
    for digest, entries in sorted(everything.objects.items()):
        place = f"objects/{digest}"
        try:
            listed = store.manifest(digest)
        except IntegrityError as error:
            found.broken.append((f"{place}/{MANIFEST}", str(error).rpartition(": ")[2] + _then(everything, digest)))
            found.objects.add(digest)
            continue
        present = {entry.key.removeprefix(f"{place}/"): entry.bytes for entry in entries}
        for name, (size, sha256) in listed.items():
            if name not in present:
                _broken(found, everything, digest, name, "the file is gone")
            elif present[name] != size:
                _broken(found, everything, digest, name, f"{present[name]} bytes, its manifest says {size}")
            else:
                jobs.append((digest, name, size, sha256))
        for name in present.keys() - listed.keys() - {MANIFEST}:
            found.noted.append((f"{place}/{name}", "not in the manifest: no run reads it; remove it by hand"))

    def check(job: tuple[str, str, int, str]) -> tuple[str, str, str] | None:
        digest, name, _, sha256 = job
        try:
            now = _sha256(store, digest, name)
        except (BucketError, OSError) as error:
            return digest, name, f"cannot be read ({error})"
        return None if now == sha256 else (digest, name, "its bytes changed since it was published")

    jobs.sort(key=lambda job: -job[2])  # the largest first, so that no core waits for it at the end
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if store.bucket.directory else 8) as pool:
        for wrong in pool.map(check, jobs):
            if wrong:
                _broken(found, everything, *wrong)
    found.files, found.bytes = len(jobs), sum(job[2] for job in jobs)


def _sha256(store: Store, digest: str, name: str) -> str:
    directory = store.object_directory(digest)
    if directory is not None:
        with (directory / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    sha256 = hashlib.sha256()
    for chunk in store.bucket.chunks(f"objects/{digest}/{name}"):
        sha256.update(chunk)
    return sha256.hexdigest()


def _broken(found: Findings, everything: Inventory, digest: str, name: str, what: str) -> None:
    found.objects.add(digest)
    found.broken.append((f"objects/{digest}/{name}", what + _then(everything, digest)))


def _then(everything: Inventory, digest: str) -> str:
    """Which stage's result it is."""
    records = everything.naming.get(digest, [])
    return f" ({records[0].meta.get('stage', '?')}'s result)" if records else " (no record names this object)"


def reconcile_records(store: Store, everything: Inventory, found: Findings) -> None:
    """Records whose object is not there, and objects that no record names."""
    for key in everything.unreadable:
        found.broken.append((key, "unreadable record: the next run that needs it makes it again"))
    for record in everything.results():
        if record.digest not in everything.objects:
            what = f"{record.meta.get('stage', '?')}: its object {record.digest[:12]} is gone"
            found.broken.append((f"results/{record.fingerprint}/{record.fence:06d}.json", what))
    orphans = [digest for digest in everything.objects if digest not in everything.naming]
    if orphans:
        size = shown(sum(everything.bytes(digest) for digest in orphans))
        found.noted.append((f"{len(orphans)} objects", f"no record names them ({size}): make gc removes them"))


def reconcile_registry(store: Store, everything: Inventory, registry: Registered, found: Findings) -> None:
    """Versions without weights, aliases without versions, receipts of versions that are gone."""
    for (model, alias), number in sorted(registry.aliases.items()):
        version = registry.versions.get((model, number))
        where = f"models:/{model}@{alias}"
        if version is None:
            found.broken.append(
                (where, f"version {number} does not exist: move the alias or delete it in the MLflow UI")
            )
        elif version.digest is None:
            found.broken.append((where, f"version {number} has no tag `digest`: no pipeline here registered it"))
        elif version.digest not in everything.objects:
            what = f"the weights of version {number} are not in this store (object {version.digest[:12]})"
            found.broken.append(
                (where, f"{what}: move the alias to a version that has them, or run its pipeline again")
            )
    for version in registry.versions.values():
        if registry.of(version.model, version.number):
            continue
        if version.digest is None:
            found.noted.append((str(version), "no tag `digest`: not registered by a pipeline here"))
        elif version.digest not in everything.objects:
            found.noted.append(
                (str(version), "has no alias, and its weights are gone (make gc keeps what an alias names)")
            )
    for record in everything.results():
        if record.payload.get("stage") == "register" and record.digest in everything.objects:
            name, number = _receipt(store, record.digest)
            if name and (name, number) not in registry.versions:
                found.noted.append((f"{name}@{number}", "deleted from the registry: the next run registers it again"))


def _receipt(store: Store, digest: str) -> tuple[str | None, int]:
    try:
        facts = json.loads(store.bucket.get(f"objects/{digest}/summary.json") or b"")
        return str(facts["name"]), int(facts["version"])
    except (ValueError, KeyError, TypeError):
        return None, 0


def repair(store: Store, everything: Inventory, found: Findings) -> list[str]:
    """Set aside what is broken. Returns the places in quarantine/."""
    places = []
    gone = {record.digest for record in everything.results() if record.digest not in everything.objects}
    unreadable = {key.split("/")[1] for key in everything.unreadable}
    results = {r.fingerprint for r in everything.results() if r.digest in found.objects | gone} | unreadable
    for fingerprint in sorted(results):
        places.append(store.set_aside(fingerprint))
    for digest in sorted(
        found.objects
    ):  # what the quick check of `set_aside` does not see, and objects without a record
        if store.bucket.entries(f"objects/{digest}"):
            place = f"quarantine/{digest[:16]}-{uuid.uuid4().hex[:8]}"
            store.bucket.move(f"objects/{digest}", f"{place}/object")
            places.append(f"{store.root}/{place}")
    return places
