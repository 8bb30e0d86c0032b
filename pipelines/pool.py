"""The driver's side of its worker processes: start, talk, stop, kill. Apart from the attempt, because a process outlives one: idle
ones are used again, above all those that have joined Ray.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from pipelines.cluster import quiet
from pipelines.worker import Job
from stages.contract import StageError

POLL_S = 0.2
STOP_GRACE_S = 8.0
"""For a stage's own clean-up after an interrupt, before its process is killed. With what the driver must still write, Ctrl-C ends
within 15 s."""
TIMEOUT_GRACE_S = 10.0
LEAVE_S = 2.0
ABSENT_S = 1.0
"""Between two looks no more than this counts as silence: a driver that stood still itself (Ctrl-Z) could hear nothing."""
LOG_LIMIT = 16 * 2**20

_alive: set["WorkerProcess"] = set()


class MayPass(StageError):
    """A failure that another attempt may not have: the process died, or time ran out."""


class WorkerProcess:
    """One worker, from its start to its end."""

    def __init__(self, number: int, logs: Path) -> None:
        self.log = logs / f"worker-{number}.log"
        self.on_ray: str | None = None
        """Address of the Ray that it has joined."""
        logs.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            if self.log.stat().st_size > LOG_LIMIT:
                self.log.replace(self.log.with_suffix(".old.log"))
        quiet()  # in the environment that it inherits
        ours, theirs = Pipe()
        with theirs, self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipelines.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is for the driver, which tells its workers
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p or str(Path.cwd()) for p in sys.path)},
            )
        self._connection = ours
        _alive.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, *message: Any) -> None:
        """Nothing happens when the process is gone: `receive` says so."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def start(self, job: Job) -> None:
        if job.ray is not None:
            self.on_ray = job.ray.address
        self.send("job", job)

    def receive(self, timeout_s: float) -> tuple[Any, ...] | None:
        """The next message, or None when there is none in time. Raises EOFError when the process is gone."""
        try:
            if self._connection.poll(timeout_s):
                message: tuple[Any, ...] = self._connection.recv()
                return message
        except OSError as error:
            raise EOFError from error
        if self.is_gone() and not self._connection.poll(0):
            raise EOFError
        return None

    def is_gone(self) -> bool:
        """Without waiting for it: until then its number, and that of its group, belongs to nobody else."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def stop(self, grace_s: float) -> None:
        """Interrupt, so that the stage cleans up after itself; after the grace, kill."""
        # Not through Popen, which reaps: what a dead process left in its group would be out of reach.
        if not self.is_gone():
            os.kill(self.pid, signal.SIGINT)
        deadline = time.monotonic() + grace_s
        with contextlib.suppress(EOFError):
            while time.monotonic() < deadline and (self.receive(POLL_S) or ("",))[0] not in ("failed", "done"):
                pass
        self.kill()

    def dismiss(self) -> None:
        """No more jobs: it ends by itself."""
        self.send("leave")
        deadline = time.monotonic() + LEAVE_S
        while not self.is_gone() and time.monotonic() < deadline:
            time.sleep(0.005)
        self.kill()

    def kill(self) -> int:
        """End it and all that it started. Returns the exit code (negative: a signal)."""
        if self._process.returncode is None:  # the group's number is ours until it is reaped, also when it is gone
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        _alive.discard(self)
        code = self._process.wait()
        self._connection.close()
        return code


class Pool:
    """Idle workers, to be used again."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._idle: list[WorkerProcess] = []
        self._started = 0
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        """Have one ready: a start takes a quarter of a second, which passes while MLflow's store is opened."""
        if not self._idle:
            self.give_back(self._start())

    def take(self, ray: str | None) -> WorkerProcess:
        """A worker of one's own: for a Ray stage rather one that has joined that Ray, for another rather one that has not."""
        with self._lock:
            for dead in [w for w in self._idle if w.is_gone()]:  # killed by somebody while it had nothing to do
                self._idle.remove(dead)
                dead.kill()
            usable = [worker for worker in self._idle if worker.on_ray in (None, ray) or ray is None]
            worker = min(usable, key=lambda w: w.on_ray != ray, default=None)
            if worker is not None:
                self._idle.remove(worker)
                return worker
        return self._start()

    def give_back(self, worker: WorkerProcess) -> None:
        """It did its job well; one that failed is ended instead, with whatever its stage left behind."""
        with self._lock:
            self._idle.append(worker)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.send("leave")
        for worker in idle:
            worker.dismiss()

    def _start(self) -> WorkerProcess:
        with self._lock:
            self._started += 1
            number = self._started
        return WorkerProcess(number, self._logs)


def kill_all() -> None:
    """For a second Ctrl-C: every worker of this process ends now."""
    for worker in list(_alive):
        with contextlib.suppress(OSError):
            os.killpg(worker.pid, signal.SIGKILL)


def converse(
    worker: WorkerProcess,
    job: Job,
    hear: Callable[..., Any],
    watch: Callable[[float], None],
) -> Any:
    """Have the worker do the job. `hear(kind, *arguments)` gets what the stage says; `watch(silence_s)` is called several times a second
    and raises to end the attempt. Returns the deposit; raises what the stage raised, or MayPass when the process died."""
    worker.start(job)
    heard = looked = time.monotonic()
    while True:
        try:
            message = worker.receive(POLL_S)
        except EOFError:
            code = worker.kill()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise MayPass(f"{job.name}: its process {how}; its last words are in {worker.log}") from None
        now = time.monotonic()
        heard += max(0.0, now - looked - ABSENT_S)
        looked = now
        kind, *arguments = message or ("",)
        if kind not in ("", "waiting"):
            heard = now
        if kind not in ("done", "failed"):  # what is in hand is not given up
            watch(now - heard)
        if not kind:
            continue
        if kind == "done":
            return arguments[0]
        if kind == "failed":
            error, trace = arguments
            if not isinstance(error, Exception):  # an interrupt that was not ours
                raise MayPass(f"{job.name}: its process was interrupted ({type(error).__name__})")
            error.add_note(f"in the worker process:\n{trace}")
            raise error
        if kind == "registry":
            worker.send("answer", *_answered(hear, arguments))
        else:
            hear(kind, *arguments)


def _answered(hear: Callable[..., Any], arguments: list[Any]) -> tuple[bool, Any]:
    from pipelines.worker import portable

    try:
        return True, hear("registry", *arguments)
    except Exception as error:
        return False, portable(error)
