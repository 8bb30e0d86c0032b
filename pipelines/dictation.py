"""The driver's side of the scribe: find or start it, hand it lines, ask it. Apart from the scribe, because nothing here may load MLflow.

A conversation that is cut (the scribe was killed, or had nothing to do for long) is begun again with another scribe. Every request can
be made twice: lines by their nature, a new run because it is looked for by its journal's name first, a new version by its digest.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines import desk as desks
from pipelines.config import ROOT
from pipelines.desk import Desk
from pipelines.journal import NotTaken, Recorded, Runs
from pipelines.lease import identity
from pipelines.registry import require_server
from stages.artifacts import Artifact
from stages.contract import ResourcesUnavailable, StageError

START_S = 60.0
GREETING_S = 20.0
"""Within which a scribe greets; it does so in milliseconds, also while it imports MLflow. One that does not is stopped or stuck."""
ANSWER_S = 180.0
"""More than it waits for a locked database or an absent server before it says so."""
TRIES = 4
LOG_LIMIT = 2**22


class Conversation:
    """One connection to the scribe of a desk; made when it is needed, again when it was cut. One request at a time."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._lines: Any = None

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer. `asked` is told to be so when the request may have been heard before. Raises what the scribe was refused
        with: ResourcesUnavailable, StageError or NotTaken."""
        with self._lock:
            for number in range(TRIES):
                try:
                    if self._socket is None:
                        self._begin()
                    assert self._socket is not None
                    desks.say(self._socket, request)
                    answer = desks.hear(self._lines)
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
                self._lines.close()
                self._socket.close()
        self._socket = None

    def _begin(self) -> None:
        """Raises OSError or EOFError when a scribe went away meanwhile, ResourcesUnavailable when none can be started."""
        known = desks.read(self._desk.record)
        if known is not None and self._greeted(known):
            return
        with self._desk.alone():
            now = desks.read(self._desk.record)
            fresh = now is not None and now != known and self._greeted(now)  # another one was faster
            if not fresh and not self._greeted(_started(self._desk)):
                raise EOFError("it does not answer")

    def _greeted(self, record: dict[str, Any]) -> bool:
        """Whether the scribe of this record answers; one that holds the line and says nothing is ended."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(GREETING_S)
        lines = None
        try:
            connection.connect(record["socket"])
            lines = connection.makefile("rb")
            desks.say(connection, {"owner": identity()})
            desks.hear(lines)
        except (OSError, EOFError) as error:
            if isinstance(error, TimeoutError):
                desks.kill(record)
            if lines is not None:
                lines.close()
            connection.close()
            return False
        connection.settimeout(ANSWER_S)
        self._socket, self._lines = connection, lines
        return True


def start_ahead(desk: Desk) -> None:
    """Have a scribe up when the first run asks for it; who asks is told of failures."""
    with contextlib.suppress(Exception), contextlib.closing(Conversation(desk)) as conversation:
        conversation.ask(op="ready")


def _dismiss(desk: Desk) -> None:
    """Those that served this desk with other code or rights end when they have nothing to do."""
    for other in desks.running(Path(desk.state)):
        if other.get("desk") == desk.digest:
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


class Dictation(Runs):
    """An open MLflow store, with this project's experiment, as `Tracking` is one, in the scribe."""

    def __init__(self, desk: Desk, experiment: str) -> None:
        """Raises ResourcesUnavailable when nothing can be recorded there."""
        super().__init__(desk.uri, Path(desk.state) / "spool")
        if desk.uri.startswith("http"):
            require_server(desk.uri, desk.timeout_s)
        self._desk, self._experiment = desk, experiment
        self._open = Conversation(desk)
        """Stays, so that the scribe sees when this process is gone."""
        self.experiment_id = str(self._open.ask(op="open", experiment=experiment)["experiment_id"])

    def sender(self, journal: Path, parent: Recorded | None, asked: bool) -> "RemoteSender":
        return RemoteSender(self._desk, self._experiment, journal, parent, asked)

    def registry(self, run: Recorded) -> "RemoteRegistry":
        return RemoteRegistry(self._desk, self._experiment, run)

    def ended_point(self, sweep: str, number: int) -> dict[str, str] | None:
        """Tags of the run of a sweep's point that came to its end; None when there is none."""
        asked = {"experiment": self._experiment, "sweep": sweep, "number": number}
        found: dict[str, str] | None = self._open.ask(op="point", **asked)["answer"]
        return found

    def close(self) -> None:
        self._open.close()


class RemoteSender:
    """Has the scribe apply the lines of one journal."""

    def __init__(self, desk: Desk, experiment: str, journal: Path, parent: Recorded | None, asked: bool) -> None:
        self._facts = {"experiment": experiment, "journal": journal.stem}
        self._parent = parent
        self._asked = asked
        self._conversation = Conversation(desk)
        self.run_id: str | None = None

    def send(self, line: dict[str, Any]) -> None:
        above = self._parent.run_id if self._parent else None
        if self._parent is not None and above is None and line["op"] == "create":
            raise LookupError("the run above this one is not recorded yet")
        asked, self._asked = self._asked, True
        answer = self._conversation.ask(
            op="line", line=line, run_id=self.run_id, above=above, asked=asked, **self._facts
        )
        self.run_id = answer["run_id"]

    def close(self) -> None:
        self._conversation.close()


class RemoteRegistry:
    """`stages.contract.Registry`, asked of the scribe."""

    def __init__(self, desk: Desk, experiment: str, run: Recorded) -> None:
        self._experiment, self._run = experiment, run
        self._conversation = Conversation(desk)

    def find(self, name: str, digest: str) -> int | None:
        found: int | None = self._ask("find", name, digest)
        return found

    def register(self, name: str, model: Artifact, tags: Mapping[str, str], metrics: Mapping[str, float]) -> int:
        plain = {"uri": model.uri, "digest": model.digest}
        return int(self._ask("register", name, plain, dict(tags), dict(metrics)))

    def alias(self, name: str, alias: str) -> int | None:
        found: int | None = self._ask("alias", name, alias)
        return found

    def set_alias(self, name: str, alias: str, version: int) -> None:
        self._ask("set_alias", name, alias, version)

    def resolve(self, model: str) -> tuple[str, str]:
        uri, digest = self._ask("resolve", model)
        return uri, digest

    def close(self) -> None:
        self._conversation.close()

    def _ask(self, method: str, *arguments: Any) -> Any:
        run_id = self._run.run_id
        asked = {"method": method, "arguments": arguments, "run_id": run_id, "asked": False}
        return self._conversation.ask(op="registry", experiment=self._experiment, **asked)["answer"]
