"""What the scribe does for drivers: open stores, apply lines, ask the registry, bring up to date. Apart from `pipelines/scribe.py`, which
listens, knows who is there, and ends.
"""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.config import redacted
from pipelines.desk import Desk
from pipelines.registry import require_server
from pipelines.store import Store
from stages.artifacts import Artifact
from stages.contract import ResourcesUnavailable, StageError

if TYPE_CHECKING:  # it imports MLflow
    from pipelines.tracking import Sender, Tracking


class Gone(Exception):
    """The database is not the one that was opened: nothing may be written any more."""


@dataclass
class _Above:
    """The run above another one, as its driver knows it."""

    run_id: str | None


class Clerk:
    """Answers requests, several at once."""

    def __init__(self, desk: Desk, await_burials: Callable[[], None]) -> None:
        """`await_burials` returns when nothing of a dead driver is being written."""
        self._desk, self._await_burials = desk, await_burials
        self._stores: dict[str, Tracking] = {}
        self._opening = threading.Lock()

    @property
    def is_ghost(self) -> bool:
        return any(store.is_ghost for store in list(self._stores.values()))

    def answer(self, request: dict[str, Any], senders: "dict[str, Sender]") -> dict[str, Any]:
        """`senders` are those of one conversation. Raises Gone."""
        if self.is_ghost:
            raise Gone
        try:
            answer: dict[str, Any] = getattr(self, f"_do_{request['op']}")(request, senders)
            return answer
        except Exception as error:
            known = next((kind for kind in (ResourcesUnavailable, StageError) if isinstance(error, kind)), None)
            said = str(error) if known else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return {"refused": redacted(said), "kind": known.__name__ if known else ""}

    def settle(self) -> None:
        """What processes that are gone left open or unsent, of all experiments at once."""
        with self._opening:
            store = next(iter(self._stores.values()), None)
            if store is None or self.is_ghost:
                return
            with contextlib.suppress(ResourcesUnavailable, OSError):  # a server that is away: at the next run
                if store.uri.startswith("http"):
                    require_server(store.uri, self._desk.timeout_s)
                store.settle()

    def _do_ready(self, request: dict[str, Any], senders: "dict[str, Sender]") -> dict[str, Any]:
        """A run will begin soon."""
        from pipelines.tracking import load

        load()
        return {}

    def _do_open(self, request: dict[str, Any], senders: "dict[str, Sender]") -> dict[str, Any]:
        """A run begins: is the store fit, and what did others leave?"""
        self._await_burials()
        return {"experiment_id": self._store(request["experiment"], renew=True).experiment_id}

    def _do_line(self, request: dict[str, Any], senders: "dict[str, Sender]") -> dict[str, Any]:
        journal = request["journal"]
        if journal not in senders:
            store = self._store(request["experiment"])
            above = _Above(request["above"]) if request["above"] else None
            senders[journal] = store.sender(store.spool / f"{journal}.jsonl", above, request["asked"])
            senders[journal].run_id = request["run_id"]
        senders[journal].send(request["line"])
        return {"run_id": senders[journal].run_id}

    def _do_registry(self, request: dict[str, Any], senders: "dict[str, Sender]") -> dict[str, Any]:
        from pipelines.registering import MlflowRegistry

        registry = MlflowRegistry(self._store(request["experiment"]), _Above(request["run_id"]), request["asked"])
        arguments = request["arguments"]
        if request["method"] == "register":
            name, model, tags, metrics = arguments
            arguments = [name, Artifact(**model), tags, metrics]
        return {"answer": getattr(registry, request["method"])(*arguments)}

    def _do_point(self, request: dict[str, Any], senders: "dict[str, Sender]") -> dict[str, Any]:
        return {"answer": self._store(request["experiment"]).ended_point(request["sweep"], request["number"])}

    def _store(self, experiment: str, renew: bool = False) -> "Tracking":
        from pipelines.tracking import Tracking

        if (known := self._stores.get(experiment)) is not None and not renew:
            return known  # also while another driver's leftovers are sent, which may take long
        desk = self._desk
        with self._opening:
            store = self._stores.get(experiment)
            if store is None:
                store = Tracking(desk.uri, Path(desk.state), experiment, desk.timeout_s, desk.place, self._maker_of)
                self._stores[experiment] = store
            else:
                store.renew()
            return store

    def _maker_of(self, fingerprint: str) -> str | None:
        """Id of the MLflow run that published a result."""
        store = Store(self._desk.store, Path(self._desk.scratch), single_writer=self._desk.single_writer)
        record, _ = store.find(fingerprint)
        return record.meta.get("run_id") if record else None
