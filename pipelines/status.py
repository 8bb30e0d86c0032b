"""`make status`: what is stored, served, registered, running and pinned, and how much room there is. Apart, because it looks at everything
and must stay light: it loads neither Ray nor MLflow, and changes nothing.
"""

import shutil
from pathlib import Path

from pipelines import cluster, desk, ledger, pins, registered
from pipelines.config import AppConfig, compose, redacted
from pipelines.console import Console
from pipelines.inventory import Inventory, Slot, shown, size
from pipelines.ledger import Invocation
from pipelines.store import Store
from stages.contract import ResourcesUnavailable
from stages.serving.endpoint import ask_ready
from stages.storage import copies

Rows = list[tuple[str, str]]


def status(console: Console, overrides: list[str], conf: str | None) -> int:
    app = compose(overrides, conf)
    store = Store.open(app)
    everything, runs = Inventory.of(store), ledger.read(store)
    for title, rows in (
        ("running", running(app, everything, runs)),
        ("served", served(app)),
        ("registered", registry(app)),
        ("stored", stored(everything, runs)),
        ("pinned", pins.shown(pins.read(store))),
        ("space", space(app, store, everything)),
    ):
        console.line(title)
        console.table(rows or [("none", "")])
    return 0


def running(app: AppConfig, everything: Inventory, runs: list[Invocation]) -> Rows:
    """Runs that go on, with the results that they are making."""
    rows = []
    leases = everything.live()
    for run in runs:
        if not run.goes_on:
            continue
        mine = [slot for slot in leases if _same(slot, run)]
        names = {step.get("fingerprint"): name for name, step in run.steps.items()}
        making = ", ".join(names.get(slot.fingerprint, slot.fingerprint[:12]) for slot in mine) or "between stages"
        rows.append((run.pipeline, f"{making}; {run.owner}, since {run.facts.get('started_at')}"))
    known = [run for run in runs if run.goes_on]
    for slot in leases:
        if not any(_same(slot, run) for run in known):
            holder = f"process {slot.holder.get('pid')} on {slot.holder.get('host')}"
            rows.append((f"result {slot.fingerprint[:12]}", f"being made by {holder}"))
    head = cluster.running_head(app.state_root)
    rows.append(("Ray head", f"process {head['pid']} at {head['address']}" if head else "not running"))
    return [
        *rows,
        *(("MLflow's scribe", f"process {one['pid']} for {one['uri']}") for one in desk.running(app.state_root)),
    ]


def _same(slot: Slot, run: Invocation) -> bool:
    owner = run.facts.get("owner") or {}
    return all(owner.get(name) == slot.holder.get(name) for name in ("pid", "started", "host"))


def served(app: AppConfig) -> Rows:
    endpoint = cluster.endpoint_record(app.state_root)
    if not endpoint:
        return []
    ready = ask_ready(endpoint["base_url"])
    answers = "answers" if ready else "does not answer: make run deploys it again"
    if ready and (ready.get("model"), ready.get("version")) != (endpoint["model"], endpoint["version"]):
        answers = f"but {ready.get('model')}@{ready.get('version')} answers there"
    return [(f"{endpoint['model']}@{endpoint['version']}", f"{endpoint['base_url']}/v1, {answers}")]


def registry(app: AppConfig) -> Rows:
    """Every model with its aliases; a registry that cannot be read is said, and the rest is still shown."""
    try:
        found = registered.read(app)
    except ResourcesUnavailable as error:
        return [("unknown", str(error))]
    rows = []
    for model in sorted({version.model for version in found.versions.values()} | {name for name, _ in found.aliases}):
        numbers = [version.number for version in found.versions.values() if version.model == model]
        aliases = [f"{alias} = {number}" for (name, alias), number in sorted(found.aliases.items()) if name == model]
        rows.append((f"models:/{model}", f"{len(numbers)} versions; {', '.join(aliases) or 'no alias'}"))
    return rows


def stored(everything: Inventory, runs: list[Invocation]) -> Rows:
    objects = sum(everything.bytes(digest) for digest in everything.objects)
    rows = [
        ("results", f"{len(everything.results())}"),
        ("objects", f"{len(everything.objects)}, {shown(objects)}"),
    ]
    for pipeline in sorted({run.pipeline for run in runs}):
        last = [run for run in runs if run.pipeline == pipeline][-1]
        rows.append((pipeline, f"last run {last.facts.get('started_at')}: {last.status}{_why(last)}"))
    return rows


def _why(run: Invocation) -> str:
    problem = str(run.facts.get("problem") or "").partition("\n")[0]
    return f" ({problem[:100]})" if problem else ""


def space(app: AppConfig, store: Store, everything: Inventory) -> Rows:
    """The store, what is half made and what was set aside; free space where this machine writes."""
    objects = sum(everything.bytes(digest) for digest in everything.objects)
    rows = [("store", redacted(f"{store.root}, {shown(objects)}"))]
    half = {name: _tree(store.scratch / name) for name in ("staging", "work")}
    rows.append(("scratch", f"{store.scratch}: " + ", ".join(f"{name} {shown(used)}" for name, used in half.items())))
    rows.append(("quarantine", shown(size(store.bucket.entries("quarantine")))))
    if store.bucket.directory is None:
        rows.append(("copies", f"{copies.cache()}: {shown(_tree(copies.cache()))}"))
    disks: dict[int, tuple[str, str]] = {}
    for label, path in (("free", store.scratch), ("free, state", app.state_root)):
        place = next(parent for parent in (path, *path.parents) if parent.exists())
        disk = shutil.disk_usage(place)
        disks.setdefault(place.stat().st_dev, (label, f"{shown(disk.free)} of {shown(disk.total)} ({place})"))
    return [*rows, *disks.values()]


def _tree(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:  # gone meanwhile
            continue
    return total
