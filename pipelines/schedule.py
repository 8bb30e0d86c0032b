"""Steps side by side: one thread each, as many as CPUs and `run.max_parallel` allow. Apart from the runner, which says what a step is;
here it is a name that wants CPUs.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

WAKE_S = 0.2


class Stopped(BaseException):
    """The run ends: whoever is told so cleans up and goes."""


class Share:
    """What a running step holds of the CPUs. It may give them back while it waits for something else."""

    def __init__(self, schedule: "Schedule", name: str, cpus: float) -> None:
        self._schedule, self._name, self._cpus = schedule, name, cpus

    @property
    def stopping(self) -> threading.Event:
        """Set when the run ends."""
        return self._schedule.stopping

    def lend(self) -> None:
        """Others may have it until `reclaim`."""
        self._schedule._release(self._name)

    def reclaim(self) -> None:
        """Wait until it is ours again. Raises Stopped."""
        while not self._schedule._claim(self._name, self._cpus):
            self.rest(WAKE_S)

    def rest(self, seconds: float) -> None:
        """Sleep, unless the run ends. Raises Stopped."""
        if self.stopping.wait(seconds):
            raise Stopped


class Schedule:
    """Running steps and what they hold."""

    def __init__(self, cpus: float, max_parallel: int) -> None:
        self.stopping = threading.Event()
        self._cpus, self._max_parallel = cpus, max_parallel
        self._held: dict[str, float] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()
        self._ended: queue.SimpleQueue[tuple[str, Any, BaseException | None]] = queue.SimpleQueue()

    @property
    def running(self) -> list[str]:
        return list(self._threads)

    def start(self, name: str, cpus: float, work: Callable[[Share], Any]) -> bool:
        """Run `work` in a thread if there is room for it; a step that wants more than there is runs alone."""
        if not self._claim(name, cpus):
            return False
        thread = threading.Thread(target=self._run, args=(name, cpus, work), name=f"step-{name}", daemon=True)
        self._threads[name] = thread
        thread.start()
        return True

    def ended(self) -> list[tuple[str, Any, BaseException | None]]:
        """(name, result, error) of steps that ended; waits a moment for one. Called by the main thread, where signals arrive."""
        found = []
        try:
            found.append(self._ended.get(timeout=WAKE_S))
            while True:
                found.append(self._ended.get_nowait())
        except queue.Empty:
            pass
        for name, _, _ in found:
            self._threads.pop(name).join()
            self._release(name)  # not before it is known how it ended: after a failure nothing may take its place
        return found

    def stop(self, patience_s: float) -> None:
        """Tell all steps that the run ends, and wait for them."""
        self.stopping.set()
        deadline = time.monotonic() + patience_s
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, name: str, cpus: float, work: Callable[[Share], Any]) -> None:
        result, error = None, None
        try:
            result = work(Share(self, name, cpus))
        except BaseException as raised:
            error = raised
        self._ended.put((name, result, error))

    def _claim(self, name: str, cpus: float) -> bool:
        with self._lock:
            if name in self._held:
                return True
            alone = not self._held
            fits = len(self._held) < self._max_parallel and sum(self._held.values()) + cpus <= self._cpus
            if alone or fits:
                self._held[name] = cpus
            return alone or fits

    def _release(self, name: str) -> None:
        with self._lock:
            self._held.pop(name, None)
