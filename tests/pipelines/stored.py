"""A small store with real records, a real ledger and a real registry, made without running anything: what housekeeping looks at."""

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow

from pipelines.config import AppConfig, StoreConfig
from pipelines.fingerprint import digest
from pipelines.lease import Lease
from pipelines.ledger import home_of_records
from pipelines.store import Record, Store


@dataclass
class World:
    """A state root and a store, and few words to fill them."""

    app: AppConfig
    store: Store

    @classmethod
    def make(cls, template: Path, state: Path, root: str | None = None, **store: Any) -> "World":
        shutil.copytree(template, state)
        app = AppConfig(name="stub", state=str(state), store=StoreConfig(root=root, **store))
        opened = Store.open(app)
        opened.prepare()
        return cls(app, opened)

    @property
    def overrides(self) -> list[str]:
        """For the command line: this state root and this store."""
        root = self.app.store.root
        return [f"state={self.app.state}", *([f"store.root={root}"] if root else [])]

    @property
    def client(self) -> mlflow.MlflowClient:
        return mlflow.MlflowClient(f"sqlite:///{self.app.state_root / 'mlflow' / 'mlflow.db'}")

    def result(self, stage: str, value: str, *inputs: Record, files: dict[str, bytes] | None = None) -> Record:
        """A published result of a stage, from other results."""
        payload = {
            "stage": stage,
            "config": {"value": value},
            "inputs": {f"in{n}": r.digest for n, r in enumerate(inputs)},
        }
        fingerprint = digest(payload)
        staged = self.store.staging_directory(fingerprint)
        staged.mkdir(parents=True)
        for name, data in {"data.bin": value.encode(), **(files or {})}.items():
            (staged / name).parent.mkdir(exist_ok=True)
            (staged / name).write_bytes(data)
        meta = {"stage": stage, "started_at": "2026-11-30 12:00:00", "seconds": 1.0}
        with Lease.acquire(self.store.bucket, fingerprint, lambda who: None, 1.0) as lease:
            return self.store.publish(self.store.deposit(staged), fingerprint, payload, meta, lease)

    def run(self, *records: Record, pipeline: str = "stub", status: str | None = "FINISHED", **facts: Any) -> str:
        """An entry in the ledger; without a status it does not end."""
        steps = {r.meta["stage"]: {"fingerprint": r.fingerprint, "digest": r.digest} for r in records}
        entry = {"steps": steps, "tracking": home_of_records(self.app), "started_at": "2026-11-30 12:00:00", **facts}
        run = self.store.begin_run(pipeline, entry)
        if status:
            self.store.end_run(pipeline, run, {"status": status})
        if "owner" in facts:
            self.store.note_run(pipeline, run, {"owner": facts["owner"]})
        return run

    def version(self, name: str, record: Record | None, *aliases: str) -> int:
        """A registered version with its aliases."""
        from mlflow.exceptions import MlflowException

        with contextlib.suppress(MlflowException):
            self.client.create_registered_model(name)
        tags = {"digest": record.digest} if record else {}
        uri = self.store.object_uri(record.digest) if record else "file:///elsewhere"
        made = self.client.create_model_version(name, source=uri, tags=tags)
        for alias in aliases:
            self.client.set_registered_model_alias(name, alias, made.version)
        return int(made.version)

    def objects(self) -> set[str]:
        return set(self.store.bucket.children("objects"))
