"""The engine: ONE thread owns the model; requests join and leave at every step. Apart from HTTP, so that nothing here awaits, and
nothing there computes.

A turn of the loop: drop what nobody waits for any more, begin waiting requests while there is room, read prompts (a bounded chunk
while others are answered, so that a long one stalls nobody), then one token for every answer. The queue is bounded. What is wrong
with one request ends that request; a failure of the model ends the engine: all requests get an error, `alive` turns false, and
whoever watches (Serve's health check) replaces the process.
"""

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from stages.serving.golden import check_golden
from stages.serving.group import Group, can_share
from stages.serving.model import LoadedModel, load_model
from stages.serving.protocol import ApiError, unavailable
from stages.serving.rows import Active, Ended, Job, Reading, Row

log = logging.getLogger(__name__)

ALONE_CHUNK = 512
"""Tokens of a prompt read at once while nobody waits for a next token."""
IDLE_S = 0.2


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    CLOSED = "closed"
    FAILED = "failed"


@dataclass
class Stats:
    """Counted since the start, but for what runs and waits now."""

    running: int = 0
    """Answers that grow, one for each choice."""
    waiting: int = 0
    """Requests that have not begun."""
    generated_tokens: int = 0
    prompt_tokens: int = 0
    """Read from prompts, once for all choices that follow one."""
    steps: int = 0
    """Turns in which every running answer got a token."""
    cancelled: int = 0
    """Requests whose client went away, or whose time was over."""


class Engine:
    """Loads in its own thread; `wait_ready` blocks until the model answered, or raises the reason why it never will."""

    def __init__(
        self,
        directory: Path,
        *,
        threads: int,
        max_queue: int,
        max_batch: int = 8,
        max_batch_tokens: int = 16_384,
        prefill_chunk: int = 64,
        stall_s: float = 120.0,
    ) -> None:
        self.state = State.LOADING
        self.error: BaseException | None = None
        self._directory, self._threads, self._stall_s = directory, threads, stall_s
        self._max_queue, self._max_batch, self._max_batch_tokens = max_queue, max_batch, max_batch_tokens
        self._prefill_chunk = prefill_chunk
        self._tick = time.monotonic()
        self._stats = Stats()
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        """Guards `_waiting`; told of a new job."""
        self._readings: deque[Reading] = deque()
        self._groups: list[Group] = []
        self._shared = True
        self._settled = threading.Event()
        self._loaded: LoadedModel | None = None
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """The thread lives and is not stuck in one step."""
        stuck = self.busy and time.monotonic() - self._tick > self._stall_s
        return self._thread.is_alive() and self.state in (State.LOADING, State.READY) and not stuck

    @property
    def busy(self) -> bool:
        """A prompt is read or an answer grows."""
        return bool(self._readings or self._groups)

    @property
    def loaded(self) -> LoadedModel:
        """The model's facts and tokenizer; ApiError 503 while there is none. Only the thread computes with it."""
        if self.state is not State.READY or self._loaded is None or not self._thread.is_alive():
            raise unavailable(
                "the model is being loaded" if self.state is State.LOADING else "the model does not answer"
            )
        return self._loaded

    def stats(self) -> Stats:
        self._stats.running = sum(len(group.rows) for group in self._groups)
        self._stats.waiting = len(self._waiting)
        return self._stats

    def wait_ready(self, timeout_s: float) -> None:
        if not self._settled.wait(timeout_s):
            raise TimeoutError(f"the model did not load and answer in {timeout_s:g} s")
        if self.error is not None:
            raise self.error

    def submit(self, job: Job) -> None:
        """Queue a job; ApiError 429 when the queue is full."""
        _ = self.loaded
        with self._changed:
            if len(self._waiting) >= self._max_queue:
                raise _queue_full(len(self._waiting))
            self._waiting.append(job)
            self._changed.notify()
        if not self.alive:  # the thread may have died between the check and the queue
            self._fail_all()

    def close(self) -> None:
        """Stop after the current step."""
        if self.state is not State.FAILED:
            self.state = State.CLOSED
        with self._changed:
            self._changed.notify()
        self._thread.join(timeout=10)

    # What follows runs in the model's thread.

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._threads)  # in this thread: OpenMP keeps the number for each thread
            self._loaded = load_model(self._directory)
            check_golden(self._loaded, self._directory)
            self._shared = can_share(self._loaded)
            if not self._shared:
                log.warning("this model's cache cannot be shared: each answer takes a pass of its own")
            if self.state is State.LOADING:
                self.state = State.READY
            self._settled.set()
            while self.state is State.READY:
                self._turn()
        except BaseException as error:
            self.error, self.state = error, State.FAILED
            log.exception("the model's thread ended")
        finally:
            self._settled.set()
            self._fail_all()

    def _turn(self) -> None:
        with self._changed:
            if not (self._waiting or self.busy):
                self._changed.wait(IDLE_S)
        self._drop()
        self._read()
        self._answer()

    def _drop(self) -> None:
        """Rows, prompts and requests that nobody waits for."""
        now = time.monotonic()
        self._tick = now
        for active in self._begun():
            if gone := _gone(active.job, now):
                self._stats.cancelled += 1
                self._end(active, gone)
        self._readings = deque(reading for reading in self._readings if not reading.active.over)
        for group in self._groups:
            group.keep([index for index, row in enumerate(group.rows) if not row.active.over])
        self._groups = [group for group in self._groups if group.rows]
        with self._changed:
            gone_now = [(job, gone) for job in self._waiting if (gone := _gone(job, now))]
            for job, _ in gone_now:
                self._waiting.remove(job)
        for job, gone in gone_now:
            self._stats.cancelled += 1
            job.emit(Ended(gone))

    def _read(self) -> None:
        """Read prompts in the order of their arrival, and begin the answers to those that are read."""
        budget = self._prefill_chunk if self._groups else ALONE_CHUNK
        while budget > 0 and (reading := self._next_reading()) is not None:
            if not reading.complete:
                count = reading.read(budget)
                budget -= count
                self._stats.prompt_tokens += count
                self._tick = time.monotonic()
                continue
            self._begin(reading)

    def _next_reading(self) -> Reading | None:
        """The prompt at the head of the line; None when there is none or no room for an answer to it."""
        while self._readings and self._readings[0].active.over:
            self._readings.popleft()
        if not self._readings:
            with self._changed:
                job = self._waiting.popleft() if self._waiting and self._room() else None
            if job is None:
                return None
            assert self._loaded is not None
            active = Active(job, len(job.prompts) * job.n)
            self._readings.extend(Reading(self._loaded, active, number) for number in range(len(job.prompts)))
        head = self._readings[0]
        return head if self._room(head.reserved) else None

    def _room(self, reserved: int = 0) -> bool:
        """Whether another answer may begin, which comes to hold so many tokens: rows of a cache are as wide as the widest."""
        rows = [row for group in self._groups for row in group.rows]
        widest = max([reserved, *(row.reserved for row in rows)])
        return len(rows) < self._max_batch and (not rows or widest * (len(rows) + 1) <= self._max_batch_tokens)

    def _begin(self, reading: Reading) -> None:
        """Begin one answer to a prompt that is read."""
        assert reading.logits is not None
        if reading.active.job.sampling.max_tokens == 0:
            self._readings.popleft()
            reading.pass_over()
            self._leave(reading.active, len(reading.choices))
            return
        row, cache = reading.next_row()
        if not reading.choices:
            self._readings.popleft()
        if not self._take(row, reading.logits.clone()):
            self._group(reading).join(row, cache)

    def _group(self, reading: Reading) -> Group:
        found = next((group for group in self._groups if group.room), None)
        if found is None:
            found = Group(reading.loaded, self._shared)
            self._groups.append(found)
        return found

    def _answer(self) -> None:
        """One token for every answer."""
        for group in list(self._groups):
            logits = group.step()
            self._tick = time.monotonic()
            likeliest, values = logits.argmax(-1).tolist(), torch.isfinite(logits.amax(-1)).tolist()
            ended = [
                row.active.over or self._take(row, logits[index], likeliest[index] if values[index] else None)
                for index, row in enumerate(group.rows)
            ]
            group.keep([index for index, over in enumerate(ended) if not over])
        self._stats.steps += bool(self._groups)
        self._groups = [group for group in self._groups if group.rows]

    def _take(self, row: Row, logits: torch.Tensor, likeliest: int | None = None) -> bool:
        """Whether the row has ended, well or not."""
        self._stats.generated_tokens += 1
        try:
            ended = row.take(logits, likeliest)
        except Exception:  # one request's numbers must not end the model for all
            log.exception("the next token could not be chosen")
            error = ApiError(500, "the next token could not be chosen", kind="server_error", code="internal_error")
            self._end(row.active, error)
            return True
        if ended:
            self._leave(row.active, 1)
        return ended

    def _leave(self, active: Active, choices: int) -> None:
        active.left -= choices
        if active.left == 0:
            active.over = True
            active.job.emit(Ended())

    def _end(self, active: Active, error: ApiError) -> None:
        """End a request before its time; what of it is under way leaves at the next turn."""
        if not active.over:
            active.over = True
            active.job.emit(Ended(error))

    def _begun(self) -> set[Active]:
        return {row.active for group in self._groups for row in group.rows} | {r.active for r in self._readings}

    def _fail_all(self) -> None:
        for active in self._begun():
            self._end(active, unavailable("the model failed while it answered"))
        with self._changed:
            waiting, self._waiting = list(self._waiting), deque()
        for job in waiting:
            job.emit(Ended(unavailable("the model does not answer")))


def timed_out() -> ApiError:
    return ApiError(408, "the answer took longer than this server allows", kind="timeout", code="request_timeout")


def _gone(job: Job, now: float) -> ApiError | None:
    """Why nobody waits for a job any more."""
    if job.cancelled.is_set():
        return ApiError(499, "the client went away", code="cancelled")
    return timed_out() if now > job.deadline else None


def _queue_full(waiting: int) -> ApiError:
    message = f"{waiting} requests are waiting already; try again in a second"
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers={"Retry-After": "1"})
