"""Results that stand in a store although no stage made them, so that planning can be measured without training anything. Apart from
the benches: two of them need a store that knows a pipeline already."""

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipelines import session
from pipelines.config import AppConfig
from pipelines.lease import Lease
from pipelines.plan import Step
from pipelines.store import Record, Store

MEMO_S = 2.1
"""The store remembers the digest of a file only when it has not changed for two seconds; a measurement begins after that."""

AT_ONCE = 16
"""Publishing waits for the disk eleven times; side by side those waits are shared."""


def complete(apps: Sequence[AppConfig]) -> int:
    """Publish until every step of every pipeline is known; how many results that took. All on one store."""
    store, made = Store.open(apps[0]), 0
    store.prepare()
    for app in apps:
        while missing := [step for step in session.planned(app)[0] if step.action == "run"]:
            for step in missing:
                assert step.fingerprint is not None and step.payload is not None
                store.remember(app.name, step.name, _publish(store, step, step.fingerprint, step.payload))
            made += len(missing)
    store.digests.save()
    return made


def fill(app: AppConfig, first: int, size: int) -> None:
    """Publish results that no pipeline asks for, until a store of `first` results holds `size`."""
    store = Store.open(app)
    like = session.planned(app)[0]

    def one(number: int) -> None:
        step = like[number % len(like)]
        assert step.payload is not None
        _publish(store, step, hashlib.sha256(f"other {number}".encode()).hexdigest(), step.payload)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, range(first, size)))  # list: an error of any of them is raised here
    store.digests.save()


def _publish(store: Store, step: Step, fingerprint: str, payload: dict[str, Any]) -> Record:
    """What a run does once the stage has returned, with the smallest tree that the stage's artifact type lets pass."""
    with Lease.acquire(store.bucket, fingerprint, lambda holder: None, 5.0) as lease:
        staged = store.staging_directory(fingerprint)
        for pattern in (*step.stage.output.members(), "summary.json"):
            path = staged / pattern.replace("*", "00000")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"made_for": fingerprint}))
        meta = {"stage": step.name, "seconds": 1.0, "started_at": "2026-01-01 00:00:00", "headline": "", "metrics": {}}
        return store.publish(store.deposit(staged), fingerprint, payload, meta, lease)
