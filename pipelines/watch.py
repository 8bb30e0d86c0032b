"""What ends a running attempt from outside: the end of the run, a lost lease, a timeout, silence. Apart, because each has its own
message, and because silence is first explained to the person who waits.
"""

import time
from collections.abc import Callable

from pipelines.config import RunConfig
from pipelines.lease import Lease, LeaseLost
from pipelines.pool import MayPass, WorkerProcess
from pipelines.schedule import Share, Stopped

ANSWER_S = 5.0
"""A worker whose process runs says within this what it waits for."""


class Watch:
    """Called several times a second with the seconds since the stage was last heard; raises to end the attempt."""

    def __init__(
        self,
        name: str,
        timeout_s: float,
        run: RunConfig,
        worker: WorkerProcess,
        lease: Lease,
        share: Share,
        tell: Callable[[str], None],
    ) -> None:
        self._name, self._timeout_s, self._run = name, timeout_s, run
        self._worker, self._lease, self._share, self._tell = worker, lease, share, tell
        self._deadline = time.monotonic() + timeout_s
        self._quiet_s = min(run.quiet_after_s, run.stall_limit_s / 2)
        self._ask_after = self._quiet_s
        self._asked: float | None = None
        self._silence_s = 0.0
        self._reason = "it says nothing"

    def __call__(self, silence_s: float) -> None:
        name, limit = self._name, self._run.stall_limit_s
        if self._share.stopping.is_set():
            raise Stopped
        if self._lease.lost.is_set():
            raise LeaseLost(f"{name}: another run took this result over; what was made here is not published")
        if time.monotonic() > self._deadline:
            raise MayPass(
                f"{name}: not done after {self._timeout_s:g} s, its limit: raise stages.{name}.resources.timeout_s"
            )
        if silence_s > limit:
            raise MayPass(
                f"{name}: no sign of it for {limit:g} s (run.stall_limit_s={limit:g}): {self._reason}; give it what it waits for, "
                f"or raise run.stall_limit_s"
            )
        if silence_s < self._silence_s:  # heard again
            self._ask_after, self._asked = self._quiet_s, None
        self._silence_s = silence_s
        if silence_s > self._ask_after:
            self._ask_after = 2 * silence_s
            self._asked = time.monotonic()
            self._worker.send("waiting")
        elif self._asked is not None and time.monotonic() - self._asked > ANSWER_S:
            self.told("its process does not answer")

    def told(self, reason: str) -> None:
        """What the worker waits for, in words."""
        self._asked, self._reason = None, reason
        self._tell(f"nothing heard for {self._silence_s:.0f} s: {reason}")
