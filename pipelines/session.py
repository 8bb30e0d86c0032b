"""What a run opens and must close: the plan's view of the world, workers, Ray, MLflow, and the signals that end it. Apart from the
runner, because a sweep opens them once for many runs.
"""

import contextlib
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from pipelines import cluster, plan
from pipelines.config import AppConfig, ClusterMode, redacted
from pipelines.console import Console
from pipelines.conversation import start_ahead
from pipelines.desk import Desk
from pipelines.dictation import Dictation
from pipelines.journal import Runs, left_behind
from pipelines.plan import Step
from pipelines.pool import Pool, kill_all
from pipelines.recorder import Point
from pipelines.registry import RegistryReader, tracking_uri
from pipelines.store import Store
from stages.contract import ResourcesUnavailable, StageError


class Terminated(BaseException):
    """SIGTERM or SIGHUP: unwinds like Ctrl-C, exits with 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        self.number = number


class PlanResolver:
    """`stages.contract.Resolver` on the store's memo and the registry."""

    def __init__(self, store: Store, registry: RegistryReader) -> None:
        self._store = store
        self.registry = registry

    @classmethod
    def of(cls, app: AppConfig, store: Store) -> "PlanResolver":
        uri = tracking_uri(app.tracking.uri, app.state_root)
        return cls(store, RegistryReader(uri, app.tracking.timeout_s))

    def path(self, path: Path) -> str:
        try:
            return self._store.digests.path(path)
        except OSError as error:
            raise StageError(f"{path}: cannot be read ({error.strerror})") from error

    def model(self, model: str) -> str:
        return self.registry.resolve(model)[1]


def planned(app: AppConfig) -> tuple[list[Step], Store]:
    """Steps with their actions decided. Light: no ray, no mlflow."""
    store = Store.open(app)
    resolver = PlanResolver.of(app, store)
    steps = plan.build(app)
    plan.decide(app, steps, store, resolver, resolver.registry)
    with contextlib.suppress(OSError):  # a memo only: a read-only or full disk is named where it matters
        store.digests.save()
    return steps, store


class Session:
    """Workers, Ray and MLflow, opened when the first stage needs them and closed once: several runs (a sweep) may share them."""

    def __init__(self, app: AppConfig, console: Console) -> None:
        self.app = app
        self.console = console
        self.pool = Pool(app.state_root / "logs")
        self._stack = contextlib.ExitStack()
        self._ray: Callable[[], cluster.Address] | None = None
        self._lock = threading.Lock()
        self._tracking: dict[str, Runs] = {}
        self.point: Point | None = None
        """Which point of a sweep is run now."""

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.close()  # before the Ray that they have joined
        cluster.give_up()
        self._stack.close()
        for store in self._tracking.values():
            store.close()

    def warm_up(self, *, ray: bool) -> None:
        """Start in the background what the first stages need: a worker, the scribe, the local head. Failures are told by
        `tracking` and `ray`."""
        self.pool.warm_up()
        if not self._tracking:
            threading.Thread(target=start_ahead, args=(Desk.of(self.app),), daemon=True).start()
        if ray and self.app.cluster.mode is ClusterMode.local and self._ray is None:
            self._ray = self._stack.enter_context(cluster.provide(self.app.cluster, self.app.state_root))
            threading.Thread(
                target=cluster.start_ahead, args=(self.app.cluster, self.app.state_root), daemon=True
            ).start()

    def ray(self) -> cluster.Address:
        """Where Ray is; waits until it is up. Raises ResourcesUnavailable."""
        with self._lock:
            if self._ray is None:
                self._ray = self._stack.enter_context(cluster.provide(self.app.cluster, self.app.state_root))
            return self._ray()

    @property
    def cpus(self) -> float:
        """Logical CPUs that stages may keep busy side by side. Those of a foreign cluster are its own scheduler's business."""
        if self.app.cluster.mode is ClusterMode.attach:
            return math.inf
        return float(cluster.logical_cpus(self.app.cluster))

    def tracking(self, experiment: str) -> Any:
        """The open tracking store for a pipeline's experiment. Raises ResourcesUnavailable."""
        name = self.app.tracking.experiment or experiment
        if name not in self._tracking:
            self._tracking[name] = Dictation(Desk.of(self.app), name)
        return self._tracking[name]

    def tidy(self, experiment: str) -> None:
        """Close in MLflow what a killed run left open, for an invocation that has nothing else to record. Light when there is nothing."""
        uri = redacted(tracking_uri(self.app.tracking.uri, self.app.state_root))
        if any(lines[0]["uri"] == uri for _, lines in left_behind(self.app.state_root / "spool")):
            with contextlib.suppress(ResourcesUnavailable):  # the next run that does something says so
                self.tracking(experiment)


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C; a second signal ends the process at once."""
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if seen:
            kill_all()
            os._exit(128 + number)
        seen.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(number)

    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
