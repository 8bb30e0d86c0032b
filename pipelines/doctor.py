"""`make doctor`: is this machine fit for what the configuration asks of it? Apart, because each line tries one thing for real, within a
limit, and leaves nothing: a person reads what was found and what to do, a script reads the exit code (0, or 5 when there is a problem).

A warning is slower, less safe or worth knowing; a problem stops a run.
"""

import threading
import time
from collections.abc import Callable

from pipelines import machine, services
from pipelines.config import AppConfig, compose
from pipelines.console import Console
from pipelines.machine import Line

LIMIT_S = 20.0
"""For one line; Ray has its own limit."""
MARKS = {"ok": "[green]ok     [/]", "warning": "[yellow]warning[/]", "problem": "[red]problem[/]"}


def doctor(console: Console, overrides: list[str], conf: str | None) -> int:
    app = compose(overrides, conf)
    # The longest one first: it runs while the others are asked and told.
    waiting = [(name, _Check(name, check, app)) for name, check in CHECKS.items()]
    problems = 0
    width = max(len(name) for name in CHECKS)
    for name, check in waiting:
        line = check.line()
        problems += line.state == "problem"
        advice = f"; {line.advice}" if line.advice else ""
        console.verdict(MARKS[line.state], f"{name.ljust(width)}  {line.found}{advice}")
    if problems:
        console.error(f"{problems} of {len(CHECKS)} checks found a problem", 5)
        return 5
    return 0


class _Check:
    """One check in a thread of its own, which is left behind when its time is over."""

    def __init__(self, name: str, check: Callable[[AppConfig], Line], app: AppConfig) -> None:
        self._limit = services.RAY_LIMIT_S + 10 if check is services.ray else LIMIT_S
        self._came: list[Line] = []
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(check, app), name=f"doctor-{name}", daemon=True)
        self._thread.start()

    def line(self) -> Line:
        self._thread.join(max(0.0, self._begun + self._limit - time.monotonic()))
        return self._came[0] if self._came else Line("problem", f"no answer within {self._limit:.0f} s")

    def _run(self, check: Callable[[AppConfig], Line], app: AppConfig) -> None:
        try:
            self._came.append(check(app))
        except Exception as error:  # a check that breaks is a finding, and the others are still worth reading
            self._came.append(Line("problem", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))


CHECKS: dict[str, Callable[[AppConfig], Line]] = {
    "python": machine.python,
    "cores": machine.cores,
    "memory": machine.memory,
    "disk": machine.disk,
    "shared memory": machine.shared_memory,
    "temporary": machine.temporary,
    "ports": machine.ports,
    "clock": machine.clock,
    "gpu": machine.gpu,
    "store": services.store,
    "tracking": services.tracking,
    "ray": services.ray,
}
