"""The store's whole content as it is at one moment, read in few requests. Apart from the store, which finds single results: here
everything is listed, for whoever cleans up, checks or shows it.
"""

import functools
import json
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pipelines.lease import is_alive, same_host
from pipelines.store import Record, Store
from stages.artifacts import MANIFEST
from stages.storage.bucket import Entry

READERS = 16
"""Requests to an object store that wait at the same time."""
SILENT_AFTER_S = 3600.0
"""A lease of another host whose beat is older than this by any clock is nobody's."""
SLOT = re.compile(r"results/([^/]+)/(\d{6})\.(json|lease\.json|beat)$")


@dataclass
class Slot:
    """One try at a result, as its files say."""

    fingerprint: str
    fence: int
    files: dict[str, Entry] = field(default_factory=dict)
    """json, lease.json, beat -> what is stored."""
    holder: dict[str, Any] = field(default_factory=dict)
    """From the lease; empty when there is none."""
    sealed: str | None = None
    removed: bool = False
    """Sealed over a record: there was a result, and it is no result any more."""
    record: Record | None = None

    @property
    def ended(self) -> bool:
        return "json" in self.files

    @property
    def key(self) -> str:
        return f"results/{self.fingerprint}/{self.fence:06d}.json"

    @property
    def is_live(self) -> bool:
        """Held by a process that lives, or that cannot be seen from here and beat lately."""
        if self.ended:
            return False
        if same_host(self.holder):
            return is_alive(self.holder)
        return time.time() - max(entry.modified for entry in self.files.values()) < SILENT_AFTER_S


@dataclass
class Inventory:
    """Objects, and the slots that name them."""

    objects: dict[str, list[Entry]]
    """Digest -> the files of the object, its manifest among them (or not: then it is not whole)."""
    slots: dict[str, list[Slot]]
    """Fingerprint -> its slots, newest first."""
    unreadable: list[str]
    """Keys of documents that are no record and no seal."""

    @classmethod
    def of(cls, store: Store) -> "Inventory":
        bucket = store.bucket
        slots: dict[tuple[str, int], Slot] = {}
        for entry in bucket.entries("results"):
            if match := SLOT.match(entry.key):
                fingerprint, fence, kind = match[1], int(match[2]), match[3]
                slots.setdefault((fingerprint, fence), Slot(fingerprint, fence)).files[kind] = entry
        unreadable: list[str] = []

        def read(slot: Slot) -> None:
            try:
                _read(store, slot)
            except (ValueError, KeyError, TypeError):
                unreadable.append(slot.key)

        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(read, slots.values()))
        by_fingerprint: dict[str, list[Slot]] = {}
        for slot in sorted(slots.values(), key=lambda slot: (slot.fingerprint, -slot.fence)):
            by_fingerprint.setdefault(slot.fingerprint, []).append(slot)
        # Objects after results: what a record read above names was whole by then.
        objects: dict[str, list[Entry]] = {}
        for entry in bucket.entries("objects"):
            objects.setdefault(entry.key.split("/")[1], []).append(entry)
        return cls(objects, by_fingerprint, sorted(unreadable))

    def all_slots(self) -> Iterator[Slot]:
        for slots in self.slots.values():
            yield from slots

    @functools.cached_property
    def records(self) -> list[Record]:
        """Every published record, superseded ones too."""
        return [slot.record for slot in self.all_slots() if slot.record is not None]

    def newest(self, fingerprint: str) -> Record | None:
        """The record that a run would find."""
        ends = (slot for slot in self.slots.get(fingerprint, []) if slot.record is not None or slot.removed)
        return next((slot.record for slot in ends), None)

    def results(self) -> list[Record]:
        """The records that runs would find."""
        return [record for fingerprint in self.slots if (record := self.newest(fingerprint)) is not None]

    @functools.cached_property
    def naming(self) -> dict[str, list[Record]]:
        """Digest -> the records that name it."""
        found: dict[str, list[Record]] = {}
        for record in self.records:
            found.setdefault(record.digest, []).append(record)
        return found

    @functools.cached_property
    def registering(self) -> dict[str, list[Record]]:
        """Digest -> the records of `register` that took it in: a checkpoint's approval is found through them."""
        found: dict[str, list[Record]] = {}
        for record in self.records:
            if record.payload.get("stage") == "register":
                for digest in record.payload.get("inputs", {}).values():
                    found.setdefault(digest, []).append(record)
        return found

    def bytes(self, digest: str) -> int:
        return size(self.objects.get(digest, []))

    def is_whole(self, digest: str) -> bool:
        """Whether the object has a manifest; its bytes are not looked at."""
        return any(entry.key.endswith(f"/{MANIFEST}") for entry in self.objects.get(digest, []))

    def live(self) -> list[Slot]:
        """Results that somebody is making now."""
        return [slots[0] for slots in self.slots.values() if slots and slots[0].is_live]


def _read(store: Store, slot: Slot) -> None:
    if "lease.json" in slot.files and not slot.ended:
        slot.holder = _document(store, slot.key.replace(".json", ".lease.json"))
    if slot.ended:
        data = json.loads(store.bucket.get(slot.key) or b"")
        if "sealed" in data:
            slot.sealed, slot.removed = str(data["sealed"]), bool(data.get("removed"))
        else:
            slot.record = Record(slot.fingerprint, data["digest"], data["payload"], data["meta"], slot.fence)


def _document(store: Store, key: str) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = json.loads(store.bucket.get(key) or b"")
        return loaded
    except ValueError:
        return {}


def size(entries: Iterable[Entry]) -> int:
    return sum(entry.bytes for entry in entries)


def shown(count: float) -> str:
    """Bytes for people: 1.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
