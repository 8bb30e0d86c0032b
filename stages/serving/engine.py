"""The engine: ONE thread owns the model and answers requests in the order of their arrival. Apart from HTTP, so that
nothing here awaits, and nothing there computes.

The queue is bounded; a cancelled request frees the thread within one token. A failure of the model ends the engine:
all waiting requests get an error, `alive` turns false, and whoever watches (Serve's health check) replaces the process.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch

from stages.serving.generate import Sampling, generate
from stages.serving.golden import check_golden
from stages.serving.model import LoadedModel, load_model
from stages.serving.protocol import ApiError, unavailable
from stages.serving.text_stream import TextStream

log = logging.getLogger(__name__)


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    CLOSED = "closed"
    FAILED = "failed"


@dataclass(frozen=True)
class Delta:
    """New text of one choice."""

    choice: int
    text: str


@dataclass(frozen=True)
class Done:
    """One choice is complete. `tokens` counts every sampled id, the one that ended the answer too."""

    choice: int
    finish_reason: str
    tokens: int


@dataclass(frozen=True)
class Ended:
    """The request is complete, or `error` says why not. Nothing follows."""

    error: ApiError | None = None


Event = Delta | Done | Ended


@dataclass(frozen=True)
class Job:
    """A request for the model: prompts in token ids, `n` answers for each; choice = prompt * n + j."""

    prompts: Sequence[Sequence[int]]
    n: int
    sampling: Sampling
    emit: Callable[[Event], None]
    """Called from the model's thread; must not block."""
    deadline: float
    """`time.monotonic()` at which the answer is no longer wanted."""
    cancelled: threading.Event = field(default_factory=threading.Event)


class Engine:
    """Loads in its own thread; `wait_ready` blocks until the model answered, or raises the reason why it never will."""

    def __init__(self, directory: Path, *, threads: int, max_queue: int, stall_s: float = 120.0) -> None:
        self.state = State.LOADING
        self.error: BaseException | None = None
        self.generated_tokens = 0
        """Ids sampled since the start: what a test watches to see that work for a gone client ends."""
        self.active: Job | None = None
        self._directory = directory
        self._threads = threads
        self._stall_s = stall_s
        self._tick = time.monotonic()
        self._queue: queue.Queue[Job] = queue.Queue(maxsize=max_queue)
        self._settled = threading.Event()
        self._loaded: LoadedModel | None = None
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """The thread lives and is not stuck in one step."""
        stuck = self.active is not None and time.monotonic() - self._tick > self._stall_s
        return self._thread.is_alive() and self.state in (State.LOADING, State.READY) and not stuck

    @property
    def loaded(self) -> LoadedModel:
        """The model's facts and tokenizer; ApiError 503 while there is none. Only the thread computes with it."""
        if self.state is not State.READY or self._loaded is None or not self._thread.is_alive():
            raise unavailable(
                "the model is being loaded" if self.state is State.LOADING else "the model does not answer"
            )
        return self._loaded

    @property
    def waiting(self) -> int:
        """Requests in the queue, without the one that is being answered."""
        return self._queue.qsize()

    def wait_ready(self, timeout_s: float) -> None:
        if not self._settled.wait(timeout_s):
            raise TimeoutError(f"the model did not load and answer in {timeout_s:g} s")
        if self.error is not None:
            raise self.error

    def submit(self, job: Job) -> None:
        """Queue a job; ApiError 429 when the queue is full."""
        _ = self.loaded
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            message = f"{self._queue.maxsize} requests are waiting already; try again in a second"
            raise ApiError(
                429, message, kind="rate_limit_error", code="queue_full", headers={"Retry-After": "1"}
            ) from None
        if not self.alive:  # the thread may have died between the check and the put
            self._fail_waiting()

    def close(self) -> None:
        """Stop after the current token."""
        if self.state is not State.FAILED:
            self.state = State.CLOSED
        if self.active:
            self.active.cancelled.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._threads)  # in this thread: OpenMP keeps the number for each thread
            self._loaded = load_model(self._directory)
            check_golden(self._loaded, self._directory)
            if self.state is State.LOADING:
                self.state = State.READY
            self._settled.set()
            while self.state is State.READY:
                self._serve_next()
        except BaseException as error:
            self.error, self.state = error, State.FAILED
            log.exception("the model's thread ended")
        finally:
            self._settled.set()
            self._fail_waiting()

    def _serve_next(self) -> None:
        try:
            job = self._queue.get(timeout=0.2)
        except queue.Empty:
            return
        if job.cancelled.is_set():
            return
        self._tick, self.active = time.monotonic(), job
        try:
            for prompt_index, prompt in enumerate(job.prompts):
                for j in range(job.n):
                    self._answer(job, prompt, prompt_index * job.n + j, j)
            job.emit(Ended())
        except ApiError as error:
            job.emit(Ended(error))
        except BaseException:
            job.emit(Ended(unavailable("the model failed while it answered")))
            raise
        finally:
            self.active = None

    def _answer(self, job: Job, prompt: Sequence[int], choice: int, j: int) -> None:
        assert self._loaded is not None
        ends = self._loaded.eos_ids if not job.sampling.ignore_eos else frozenset()
        ends |= job.sampling.stop_ids
        text = TextStream(self._loaded.backend, prompt, job.sampling.stop)
        tokens, finish_reason = 0, "length"
        for token in generate(self._loaded, prompt, job.sampling, j):
            self._tick = time.monotonic()
            self.generated_tokens += 1
            tokens += 1
            if job.cancelled.is_set():
                raise ApiError(499, "the client went away", code="cancelled")
            if self._tick > job.deadline:
                raise timed_out()
            if token in ends:
                finish_reason = "stop"
                break
            if delta := text.push(token):
                job.emit(Delta(choice, delta))
            if text.stopped:
                finish_reason = "stop"
                break
        if rest := text.flush():
            job.emit(Delta(choice, rest))
        job.emit(Done(choice, finish_reason, tokens))

    def _fail_waiting(self) -> None:
        while True:
            try:
                self._queue.get_nowait().emit(Ended(unavailable("the model does not answer")))
            except queue.Empty:
                return


def timed_out() -> ApiError:
    return ApiError(408, "the answer took longer than this server allows", kind="timeout", code="request_timeout")
