"""One conversation with the scribe: find it or start it, ask, begin again when it is cut. Apart from `pipelines/dictation.py`, which
says what is asked.

A conversation is cut when the scribe was killed, or had nothing to do for long. Every request can be made twice: lines by their nature, a
new run because it is looked for by its journal's name first, a new version by its digest.
"""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines import desk as desks
from pipelines.config import ROOT
from pipelines.desk import Desk
from pipelines.journal import NotTaken
from pipelines.lease import identity
from stages.contract import ResourcesUnavailable, StageError

START_S = 60.0
GREETING_S = 20.0
"""Within which a scribe greets; it does so in milliseconds, also while it imports MLflow. One that does not is stopped or stuck."""
ANSWER_S = 180.0
"""More than it waits for a locked database or an absent server before it says so."""
LOOK_S = 0.5
"""How often a driver that waits looks whether the scribe is paused."""
TRIES = 4
LOG_LIMIT = 2**22


class Conversation:
    """One connection to the scribe of a desk; made when it is needed, again when it was cut. One request at a time."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._lines: Any = None
        self._scribe: dict[str, Any] = {}

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer. `asked` is told to be so when the request may have been heard before. Raises what the scribe was refused
        with: ResourcesUnavailable, StageError or NotTaken."""
        with self._lock:
            for number in range(TRIES):
                try:
                    if self._socket is None:
                        self._begin()
                    answer = self._exchange(request, ANSWER_S)
                    break
                except TimeoutError as error:
                    self._cut()
                    raise ResourcesUnavailable(
                        f"the process that keeps MLflow open did not answer within {ANSWER_S:.0f} s"
                    ) from error
                except (OSError, EOFError) as error:
                    self._cut()
                    if number == TRIES - 1:
                        raise ResourcesUnavailable(
                            f"the process that keeps MLflow open went away {TRIES} times ({error}); its log is {log(self._desk)}"
                        ) from error
                    if "asked" in request:
                        request["asked"] = True
                except (
                    BaseException
                ):  # a signal between question and answer: the next question must not get this answer
                    self._cut()
                    raise
        if "refused" in answer:
            kinds: dict[str, type[Exception]] = {"ResourcesUnavailable": ResourcesUnavailable, "StageError": StageError}
            raise kinds.get(answer["kind"], NotTaken)(answer["refused"])
        return answer

    def close(self) -> None:
        with self._lock:
            self._cut()

    def _cut(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                if self._lines is not None:
                    self._lines.close()
                self._socket.close()
        self._socket = self._lines = None

    def _begin(self) -> None:
        """Raises OSError or EOFError when a scribe went away meanwhile, ResourcesUnavailable when none can be started."""
        desk = self._desk
        known = desks.read(desk.record)
        if known is not None and self._greeted(known):
            return
        try:
            desk.records.mkdir(parents=True, exist_ok=True)
            with desk.alone():
                now = desks.read(desk.record)
                if now is not None and now != known and self._greeted(now):
                    return  # another one was faster
                begun = _started(desk)
        except OSError as error:
            raise ResourcesUnavailable(f"the process that keeps MLflow open cannot be started ({error})") from error
        if not self._greeted(begun):
            raise EOFError("it does not answer")

    def _greeted(self, record: dict[str, Any]) -> bool:
        """Whether the scribe of this record answers; one that holds the line and says nothing is ended."""
        if not desks.is_ours(Path(record["socket"])):
            return False
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(GREETING_S)
        self._socket, self._scribe = connection, record
        try:
            connection.connect(record["socket"])
            self._lines = connection.makefile("rb")
            self._exchange({"owner": identity()}, GREETING_S)
        except (OSError, EOFError) as error:
            self._cut()
            if isinstance(error, TimeoutError):
                desks.kill(record)
            return False
        connection.settimeout(ANSWER_S)
        return True

    def _exchange(self, request: dict[str, Any], within_s: float) -> dict[str, Any]:
        """The answer. Raises OSError or EOFError when the scribe went away, TimeoutError when it is there and says nothing."""
        assert self._socket is not None
        deadline = time.monotonic() + within_s
        left = memoryview(desks.written(request))
        while left:
            self._await(select.POLLOUT, deadline)
            left = left[self._socket.send(left) :]
        self._await(select.POLLIN, deadline)
        return desks.hear(self._lines)

    def _await(self, what: int, deadline: float) -> None:
        """Until the line is ready for it. A scribe that somebody paused is ended: it would keep all runs waiting."""
        waiting = select.poll()
        waiting.register(self._socket.fileno() if self._socket else -1, what)
        paused = 0
        while not waiting.poll(1000 * LOOK_S):
            paused = paused + 1 if desks.is_paused(self._scribe) else 0
            if paused > 1:
                desks.kill(self._scribe)
                raise EOFError("it was paused, and is ended")
            if time.monotonic() > deadline:
                raise TimeoutError


def start_ahead(desk: Desk) -> None:
    """Have a scribe up when the first run asks for it; who asks is told of failures."""
    with contextlib.suppress(Exception), contextlib.closing(Conversation(desk)) as conversation:
        conversation.ask(op="ready")


def _dismiss(desk: Desk) -> None:
    """Those that served this desk with other code or rights end when they have nothing to do; what dead ones left is taken away."""
    for other in desks.running(Path(desk.state)):
        if desks.is_paused(other):
            desks.kill(other)
        elif other.get("desk") == desk.digest and desks.is_ours(Path(other["socket"])):
            with (
                contextlib.suppress(OSError, EOFError),
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
            ):
                connection.settimeout(1.0)
                connection.connect(other["socket"])
                with connection.makefile("rb") as lines:
                    for message in ({"owner": identity()}, {"op": "leave"}):
                        desks.say(connection, message)
                        desks.hear(lines)
    desks.sweep(Path(desk.state))


def log(desk: Desk) -> Path:
    return Path(desk.state) / "logs" / "scribe.log"


def _started(desk: Desk) -> dict[str, Any]:
    """A new scribe's record, once it listens. Raises ResourcesUnavailable. The caller is alone."""
    record, nonce, place = desk.record, uuid.uuid4().hex, log(desk)
    _dismiss(desk)
    place.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        if place.stat().st_size > LOG_LIMIT:
            place.replace(place.with_suffix(".old.log"))
    search = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    with place.open("ab") as output:
        scribe = subprocess.Popen(
            [sys.executable, "-m", "pipelines.scribe"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it outlives this run, and Ctrl-C is not for it
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": search},
        )
    given = {"desk": asdict(desk), "record": str(record), "nonce": nonce}
    assert scribe.stdin is not None
    with contextlib.suppress(BrokenPipeError), scribe.stdin:
        scribe.stdin.write(json.dumps(given).encode())
    deadline = time.monotonic() + START_S
    while scribe.poll() is None and time.monotonic() < deadline:
        found = desks.read(record)
        if found and found.get("nonce") == nonce:
            scribe.returncode = 0  # it outlives us: no warning about that, and nobody waits for it
            return found
        time.sleep(0.01)
    how = f"ended with code {scribe.returncode}" if scribe.poll() is not None else f"is not up after {START_S:.0f} s"
    if scribe.returncode is None:
        scribe.kill()
        scribe.wait()
    raise ResourcesUnavailable(f"the process that keeps MLflow open {how}; its log is {place}")
