"""`make pin` and `make unpin`: what a person wants kept, whatever else is forgotten. Apart, because anybody may pin at any time, and
`make gc` only reads what is pinned.
"""

import getpass
import json
import os
import re
import socket
import time
from dataclasses import dataclass

from pipelines import ledger
from pipelines.config import AppConfig, compose
from pipelines.console import Console
from pipelines.mistakes import ConfigError
from pipelines.registry import RegistryReader, tracking_uri
from pipelines.store import Store

USAGE = "WHAT=models:/name@champion, WHAT=<first characters of a digest> or WHAT=<id of a run>"


@dataclass(frozen=True)
class Pin:
    """Something that is kept until it is unpinned."""

    name: str
    what: str
    """As it was typed."""
    digests: tuple[str, ...]
    fingerprints: tuple[str, ...]
    by: str
    at: str


def read(store: Store) -> list[Pin]:
    """All pins, by name. An unreadable one is an error: what it keeps would be lost."""
    found = []
    for file in store.bucket.children("pins"):
        try:
            d = json.loads(store.bucket.get(f"pins/{file}") or b"")
            found.append(
                Pin(
                    d["name"],
                    d["what"],
                    tuple(d["digests"]),
                    tuple(d["fingerprints"]),
                    f"{d['by']}@{d['host']}",
                    d["at"],
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{store.root}/pins/{file}: not readable as a pin; remove the file or restore it"
            ) from error
    return found


def pin(console: Console, overrides: list[str], conf: str | None) -> int:
    app = compose(overrides, conf)
    store, what = Store.open(app), _what()
    name, digests, fingerprints = _resolved(app, store, what)
    document = {
        "name": name,
        "what": what,
        "digests": digests,
        "fingerprints": fingerprints,
        "by": _user(),
        "host": socket.gethostname(),
        "at": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    store.bucket.put(f"pins/{name}.json", json.dumps(document, indent=1, sort_keys=True).encode())
    console.line(
        f"pinned {what} as {name}: {len(digests)} objects and what they were made from stay; make unpin WHAT={name}"
    )
    return 0


def unpin(console: Console, overrides: list[str], conf: str | None) -> int:
    app = compose(overrides, conf)
    store, what = Store.open(app), _what()
    named = [pin for pin in read(store) if what in (pin.name, pin.what)]
    if not named:
        known = ", ".join(pin.name for pin in read(store)) or "none"
        raise ConfigError(f"WHAT={what}: there is no such pin; there are: {known}")
    store.bucket.delete(f"pins/{pin.name}.json" for pin in named)
    console.line(f"unpinned {', '.join(pin.name for pin in named)}")
    return 0


def _resolved(app: AppConfig, store: Store, what: str) -> tuple[str, list[str], list[str]]:
    """(name of the pin, digests, fingerprints): an alias is pinned as what it points at now."""
    if what.startswith("models:/"):
        reader = RegistryReader(tracking_uri(app.tracking.uri, app.state_root), app.tracking.timeout_s)
        model, version = reader._name_and_version(what)
        digest = reader.resolve(what)[1]
        _require_stored(store, what, [digest])
        return f"{model}-{version}", [digest], []
    runs = [run for run in ledger.read(store) if what == run.id or what == run.facts.get("run_id")]
    if runs:
        steps = list(runs[0].steps.values())
        digests = sorted({str(step["digest"]) for step in steps if step.get("digest")})
        return runs[0].id, digests, sorted({str(s["fingerprint"]) for s in steps if s.get("fingerprint")})
    if not re.fullmatch(r"[0-9a-f]{6,64}", what):
        raise ConfigError(f"WHAT={what}: neither a model, nor a run of this store, nor a digest; write {USAGE}")
    found = [digest for digest in store.bucket.children("objects") if digest.startswith(what)]
    if len(found) != 1:
        have = (
            f"{len(found)} objects begin so: {', '.join(d[:16] for d in found[:5])}" if found else "no object begins so"
        )
        raise ConfigError(f"WHAT={what}: {have}")
    return found[0][:16], found, []


def _require_stored(store: Store, what: str, digests: list[str]) -> None:
    for digest in digests:
        if not store.bucket.entries(f"objects/{digest}"):
            raise ConfigError(f"WHAT={what}: its object {digest[:12]} is not in {store.root}: there is nothing to keep")


def _what() -> str:
    what = os.environ.get("WHAT", "").strip()
    if not what:
        raise ConfigError(f"nothing named: {USAGE}")
    return what


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user has no name
        return str(os.getuid())


def shown(pins: list[Pin]) -> list[tuple[str, str]]:
    """For `make status`."""
    return [(pin.name, f"{pin.what}, by {pin.by} at {pin.at}") for pin in pins]


def roots(pins: list[Pin]) -> list[tuple[str, set[str], set[str]]]:
    """(label, digests, fingerprints) that pins keep."""
    return [(f"pin {pin.name} ({pin.by}, {pin.at[:10]})", set(pin.digests), set(pin.fingerprints)) for pin in pins]
