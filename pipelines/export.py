"""`make export MODEL=models:/name@champion TO=folder`: a registered model as a plain Hugging Face folder, for whoever has nothing of this
project. Apart from the store, because what leaves it must be whole by itself: weights, tokenizer, settings, and a card that says
where it came from. Every byte is hashed as it is copied; the folder appears whole or not at all.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.config import compose
from pipelines.console import Console
from pipelines.inventory import Inventory, shown
from pipelines.mistakes import ConfigError
from pipelines.registry import RegistryReader, tracking_uri
from pipelines.store import IntegrityError, Record, Store
from stages.artifacts import ADAPTED
from stages.contract import ResourcesUnavailable
from stages.storage.bucket import fsync

OURS = ("summary.json", "golden.json")
"""Files of an artifact that mean something here only."""
CARD = "README.md"


def export(console: Console, overrides: list[str], conf: str | None) -> int:
    app = compose(overrides, conf)
    model, target = _asked()
    reader = RegistryReader(tracking_uri(app.tracking.uri, app.state_root), app.tracking.timeout_s)
    name, number = reader._name_and_version(model)
    digest = reader.resolve(f"models:/{name}/{number}")[1]
    store = Store.open(app)
    listed = {file: entry for file, entry in store.manifest(digest).items() if file not in OURS}
    _require_room(target, sum(size for size, _ in listed.values()))
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}"
    try:
        partial.mkdir(parents=True)
        for file, (_, sha256) in listed.items():
            _copy(store, digest, file, sha256, partial / file)
        (partial / CARD).write_text(card(store, name, number, digest), "utf-8")
        for path in (partial / CARD, partial):
            fsync(path)
        partial.rename(target)  # onto an empty directory too
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    total = shown(sum(size for size, _ in listed.values()))
    console.line(f"{name}@{number} is in {target} ({len(listed)} files, {total}); read its {CARD}")
    return 0


def _asked() -> tuple[str, Path]:
    model, to = os.environ.get("MODEL", "").strip(), os.environ.get("TO", "").strip()
    if not model.startswith("models:/") or not to:
        raise ConfigError(
            "name a registered model and a folder: make export MODEL=models:/quickstart@champion TO=folder"
        )
    target = Path(to).expanduser().absolute()
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise ConfigError(f"TO={to}: exists and is not an empty folder; nothing is written over, name another")
    return model, target


def _require_room(target: Path, wanted: int) -> None:
    place = next(parent for parent in target.parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < wanted:
        raise ResourcesUnavailable(f"TO={target}: {shown(wanted)} are needed, {shown(free)} are free in {place}")


def _copy(store: Store, digest: str, file: str, sha256: str, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    found = hashlib.sha256()
    with to.open("wb") as output:
        for chunk in store.bucket.chunks(f"objects/{digest}/{file}"):
            found.update(chunk)
            output.write(chunk)
        output.flush()
        os.fsync(output.fileno())
    if found.hexdigest() != sha256:
        raise IntegrityError(
            f"{store.object_uri(digest)}/{file}: its bytes changed since it was published; nothing was exported "
            "(make verify shows what else is broken)"
        )


def card(store: Store, name: str, number: int, digest: str) -> str:
    """The model card: facts that anybody can check, and how it came to be."""
    everything = Inventory.of(store)
    made = everything.naming.get(digest, [])
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "---",
        f"# {name}, version {number}",
        "",
        f"Exported by Raykeel from the registered model `{name}`, version {number}. {_loads(store, digest)}",
        "",
        f"- content digest of the checkpoint: `{digest}`",
    ]
    if made:
        lines += _origin(made[0])
    lines += list(_metrics(store, everything, digest))
    lines += ["", "## Lineage", "", "Each result with the content digest of what it was made from.", ""]
    lines += list(_lineage(everything, digest))
    return "\n".join(lines) + "\n"


def _loads(store: Store, digest: str) -> str:
    base = store.bucket.get(f"objects/{digest}/{ADAPTED}")
    if base is None:
        return "Loads with\n`AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`; no code comes with it."
    known = json.loads(base)
    return (
        f"It is a LoRA\nadapter on `{known['name']}` (revision {known['revision']}, SHA-256 of the weights "
        f"`{known['weights_sha256']}`), which is not in this folder: `PeftModel.from_pretrained(base, folder)` of PEFT loads both."
    )


def _origin(record: Record) -> list[str]:
    meta, git = record.meta, record.meta.get("git") or {}
    code = f"commit `{git.get('commit')}`" + (" with changes that were not committed" if git.get("dirty") else "")
    lines = [
        f"- made by `{record.payload.get('stage')}` at {meta.get('started_at')} in {meta.get('seconds')} s",
        f"- {code}" if git.get("commit") else "- made outside a git checkout",
        f"- seed {record.payload.get('seed')}, libraries {json.dumps(record.payload.get('env', {}), sort_keys=True)}",
    ]
    if meta.get("run_id"):
        lines.append(f"- MLflow run `{meta['run_id']}`")
    config = json.dumps(record.payload.get("config", {}), indent=1, sort_keys=True)
    return [*lines, "", "## Configuration", "", "```json", config, "```"]


def _metrics(store: Store, everything: Inventory, digest: str) -> Iterator[str]:
    """From the reports that judged this checkpoint."""
    for record in everything.results():
        if digest not in record.payload.get("inputs", {}).values():
            continue
        report = _summary(store, record.digest)
        numbers = {k: v for k, v in report.get("metrics", {}).items() if isinstance(v, int | float)}
        if numbers:
            yield from ("", f"## Metrics, by `{record.payload.get('stage')}`", "", "| metric | value |", "|---|---|")
            yield from (f"| {key} | {value:.6g} |" for key, value in sorted(numbers.items()))


def _lineage(everything: Inventory, digest: str) -> Iterator[str]:
    waiting, seen = [digest], set()
    while waiting:
        current = waiting.pop(0)
        if current in seen:
            continue
        seen.add(current)
        for record in everything.naming.get(current, [])[:1]:
            inputs = record.payload.get("inputs", {})
            taken = ", ".join(f"{what} `{source[:16]}`" for what, source in sorted(inputs.items())) or "no stored input"
            sources = ", ".join(
                f"{what} `{value[:40]}`" for what, value in sorted(record.payload.get("sources", {}).items())
            )
            yield f"- {record.payload.get('stage')} `{current[:16]}` from {taken}" + (
                f"; source {sources}" if sources else ""
            )
            waiting += inputs.values()


def _summary(store: Store, digest: str) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = json.loads(store.bucket.get(f"objects/{digest}/summary.json") or b"")
        return loaded
    except ValueError:
        return {}
