"""`make gc`: forgets what nothing reaches any more. Apart, because it is the only code that removes published bytes.

What stays, and why, is `pipelines/reach.py`'s to say. While anybody makes a result, no other result goes: it may come to bytes that are
there already, and then names them. Whoever begins later waits (`pipelines/turns.py`).

A forgotten result's newest slot is closed and stays: fences never go down, so no stalled process can publish into a slot that was freed.
Order of deletion: the record is closed, then the manifest goes, then the bytes: a kill leaves an object without a record for the next time.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from pipelines import ledger, registered
from pipelines.config import AppConfig, compose
from pipelines.console import Console
from pipelines.inventory import READERS, Inventory, Slot, shown, size
from pipelines.lease import Slots, identity, is_alive, same_host
from pipelines.ledger import Invocation
from pipelines.reach import Root, is_kept, reach, roots
from pipelines.store import Record, Store
from pipelines.turns import Turns, once
from stages.artifacts import MANIFEST
from stages.storage.bucket import Entry

LARGEST = 5


@dataclass
class Doomed:
    """One thing to remove."""

    kind: str
    name: str
    bytes: int
    remove: Callable[[], None]
    note: str = ""


@dataclass
class Plan:
    """What stays and why, and what goes."""

    roots: list[Root]
    kept: dict[str, list[str]] = field(default_factory=dict)
    """Digest -> labels of the roots that reach it."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Digest -> bytes of the object."""
    doomed: list[Doomed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(doomed.bytes for doomed in self.doomed)


def gc(console: Console, overrides: list[str], conf: str | None) -> int:
    """A dry run; with APPLY=1 in the environment it deletes."""
    app = compose(overrides, conf)
    store = Store.open(app)
    if os.environ.get("APPLY", "") in ("", "0"):
        found = plan(app, store)
        show(console, found)
        if found.doomed:
            console.line(f"{shown(found.bytes)} could be removed; nothing was: make gc APPLY=1 removes it")
        return 0
    turns = Turns(store, app.run.lease_timeout_s)
    with turns.removing(once(console)) as check:
        found = plan(app, store)
        show(console, found)
        sweep(found, check)
    if found.doomed:
        console.line(f"removed {shown(found.bytes)}")
    return 0


def plan(app: AppConfig, store: Store) -> Plan:
    """Mark by reachability; nothing is changed. The ledger is read before the records, so that what a run made meanwhile is in its
    entry. Right for as long as nobody begins anything: until the end of our turn."""
    runs = ledger.read(store)
    registry = registered.read(app)
    everything = Inventory.of(store)
    found = Plan(roots(app, store, runs, registry))
    for root in found.roots:
        for digest in reach(everything, root):
            found.kept.setdefault(digest, []).append(root.label)
            found.sizes[digest] = everything.bytes(digest)
    remembered = [run for run in runs if is_kept(run, found.roots)]
    live = everything.live()
    if live:
        _spare(everything, live[0], found)
    else:
        _doom_objects(store, everything, found)
    _doom_results(store, everything, found, spared=bool(live))
    _doom_runs(store, runs, remembered, found)
    needed = {str(step["fingerprint"]) for run in remembered for step in run.steps.values() if step.get("fingerprint")}
    _doom_scratch(store, everything, needed, found)
    _doom_mirrored_work(store, everything, needed, found)
    _doom_quarantine(app, store, found)
    return found


# What goes


def _spare(everything: Inventory, maker: Slot, found: Plan) -> None:
    """Somebody makes a result now: nobody knows which bytes it will come to."""
    spared = [digest for digest in everything.objects if digest not in found.kept]
    if spared:
        found.notes.append(
            f"{len(spared)} objects ({shown(sum(everything.bytes(digest) for digest in spared))}) that nothing reaches stay for now: "
            f"process {maker.holder.get('pid')} on {maker.holder.get('host')} is making a result and may come to the same bytes"
        )


def _doom_objects(store: Store, everything: Inventory, found: Plan) -> None:
    for digest, entries in everything.objects.items():
        if digest in found.kept:
            continue
        records = everything.naming.get(digest, [])

        def remove(digest: str = digest) -> None:
            keys = [entry.key for entry in store.bucket.entries(f"objects/{digest}")]
            keys.sort(key=lambda key: not key.endswith(f"/{MANIFEST}"))
            store.bucket.delete(keys)

        kind = "objects" if records else "objects without a record"
        found.doomed.append(Doomed(kind, digest, size(entries), remove, _told(records)))


def _told(records: list[Record]) -> str:
    """What made an object, for the table."""
    for record in records:
        return f"{record.meta.get('stage', '?')}, made {record.meta.get('started_at', '?')}"
    return ""


def _doom_results(store: Store, everything: Inventory, found: Plan, *, spared: bool) -> None:
    """Records of what goes: the newest slot is closed and stays, older ones go when nobody can still write into them."""
    for slots in everything.slots.values():
        for slot in slots:
            stays = slot.record is not None and (spared or slot.record.digest in found.kept)
            if stays or not slot.ended or slot.key in everything.unreadable:
                continue
            if slot is slots[0]:
                if slot.record is not None:
                    found.doomed.append(
                        Doomed("results", slot.fingerprint[:16], slot.files["json"].bytes, _seal(store, slot))
                    )
            elif _is_over(store, slot):
                keys = [entry.key for entry in slot.files.values()]
                kind = "superseded slots" if slot.record is None else "results"
                found.doomed.append(Doomed(kind, slot.key, size(slot.files.values()), _delete(store, keys)))


def _is_over(store: Store, slot: Slot) -> bool:
    """Whether its holder can never write into it again: it closed the slot itself, or its process is gone from this host."""
    if slot.record is not None or "taken over" not in (slot.sealed or "taken over"):
        return True
    holder = Slots(store.bucket, slot.fingerprint, [f"{slot.fence:06d}.lease.json"]).holder()
    return holder is not None and same_host(holder) and not is_alive(holder)


def _seal(store: Store, slot: Slot) -> Callable[[], None]:
    """`removed`: there was a result, so nobody looks for an older one."""
    seal = {"sealed": "collected by make gc", "removed": True, **identity()}
    return lambda: store.bucket.put(slot.key, json.dumps(seal).encode())


def _delete(store: Store, keys: list[str]) -> Callable[[], None]:
    return lambda: store.bucket.delete(keys)


def _doom_runs(store: Store, runs: list[Invocation], remembered: list[Invocation], found: Plan) -> None:
    for run in runs:
        if run not in remembered:
            key = f"runs/{run.pipeline}/{run.id}.json"
            found.doomed.append(Doomed("runs in the ledger", run.id, 0, _delete(store, [key])))


def _doom_scratch(store: Store, everything: Inventory, needed: set[str], found: Plan) -> None:
    """What killed processes of this host left half made, and resumable state that no remembered run would resume."""
    for path in store.abandoned():
        found.doomed.append(Doomed("staging", path.name, _tree_size(path), _remove_tree(path)))
    for path in (store.scratch / "work").glob("*"):
        if _is_left(everything, needed, path.name):
            found.doomed.append(Doomed("work", path.name[:16], _tree_size(path), _remove_tree(path)))


def _doom_mirrored_work(store: Store, everything: Inventory, needed: set[str], found: Plan) -> None:
    """Resumable state that an attached cluster's nodes keep in the object store."""
    if store.bucket.directory is not None:
        return
    by_name: dict[str, list[Entry]] = {}
    for entry in store.bucket.entries("work"):
        by_name.setdefault(entry.key.split("/")[1], []).append(entry)
    for name, entries in by_name.items():
        if _is_left(everything, needed, name):
            remove = _delete(store, [entry.key for entry in entries])
            found.doomed.append(Doomed("work", name[:16], size(entries), remove))


def _is_left(everything: Inventory, needed: set[str], name: str) -> bool:
    """Whether nobody makes this result now or would go on from this state. A forced run (`<fingerprint>-...`) never goes on."""
    fingerprint, _, forced = name.partition("-")
    slots = everything.slots.get(fingerprint, [])
    being_made = bool(slots) and not slots[0].ended and _may_live(slots[0])
    return not being_made and (bool(forced) or fingerprint not in needed)


def _may_live(slot: Slot) -> bool:
    """Another host's holder may share this scratch (one file system) and sleep: only a process seen dead is dead."""
    return not same_host(slot.holder) or is_alive(slot.holder)


def _doom_quarantine(app: AppConfig, store: Store, found: Plan) -> None:
    by_place: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    newest: dict[str, float] = {}
    for entry in store.bucket.entries("quarantine"):
        place = entry.key.split("/")[1]
        by_place.setdefault(place, []).append(entry.key)
        sizes[place] = sizes.get(place, 0) + entry.bytes
        newest[place] = max(newest.get(place, 0.0), entry.modified)
    for place, keys in by_place.items():
        if time.time() - newest[place] > app.store.keep_quarantine_days * 86400:
            found.doomed.append(Doomed("quarantine", place, sizes[place], _delete(store, keys)))


def _tree_size(path: Path) -> int:
    total = 0
    for file in [path, *path.rglob("*")]:
        try:
            total += file.lstat().st_size if not file.is_dir() else 0
        except OSError:  # gone meanwhile
            continue
    return total


def _remove_tree(path: Path) -> Callable[[], None]:
    return lambda: shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def sweep(found: Plan, check: Callable[[], None] = lambda: None) -> None:
    """Remove, records before objects. `check` raises when it is no longer our turn."""
    first = ("results", "superseded slots", "runs in the ledger")

    def remove(doomed: Doomed) -> None:
        check()
        doomed.remove()

    for group in (
        [doomed for doomed in found.doomed if doomed.kind in first],
        [doomed for doomed in found.doomed if doomed.kind not in first],
    ):
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(remove, group))


# Saying so


def show(console: Console, found: Plan) -> None:
    """Kept, by what; then what goes, by kind, and the largest of it."""
    total = sum(found.sizes[digest] for digest in found.kept)
    console.line(f"kept: {len(found.kept)} objects, {shown(total)}")
    rows = []
    for root in found.roots:
        mine = [digest for digest, labels in found.kept.items() if root.label in labels]
        only = [digest for digest in mine if len(found.kept[digest]) == 1]
        alone = f", {shown(sum(found.sizes[digest] for digest in only))} by this alone" if only else ""
        rows.append((root.label, f"{len(mine)} objects, {shown(sum(found.sizes[d] for d in mine))}{alone}"))
    console.table(rows or [("nothing", "no alias, endpoint, pin or run reaches anything")])
    for note in found.notes:
        console.line(note)
    if not found.doomed:
        console.line("nothing to remove")
        return
    console.line("not reached:")
    console.table(_by_kind(found.doomed))
    largest = sorted((d for d in found.doomed if d.bytes), key=lambda d: -d.bytes)[:LARGEST]
    if largest:
        console.line("the largest:")
        console.table([(d.name[:24], f"{shown(d.bytes).rjust(9)}  {d.kind}  {d.note}".rstrip()) for d in largest])


def _by_kind(doomed: Iterable[Doomed]) -> list[tuple[str, str]]:
    kinds: dict[str, list[Doomed]] = {}
    for one in doomed:
        kinds.setdefault(one.kind, []).append(one)
    return [(kind, f"{len(many):6d}  {shown(sum(d.bytes for d in many)).rjust(9)}") for kind, many in kinds.items()]
