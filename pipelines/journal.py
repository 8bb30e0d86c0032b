"""A run's record as JSON lines on disk, sent to the tracking store by a thread. Apart, because it is what makes a slow, absent
or full store harmless: a stage never waits for it, and what was not sent is replayed at the next start.
"""

import contextlib
import json
import queue
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pipelines.config import redacted
from pipelines.lease import identity, is_alive, same_host
from stages.artifacts import Artifact

DATASET_DIGEST_LIMIT = 36
CLOSE_TIMEOUT_S = 30.0
"""Less what an outage has already lasted: who did not answer for half a minute gets three seconds more."""
KILLED_TIMEOUT_S = 3.0
"""A person who pressed Ctrl-C does not wait for a server."""
RETRY_S = 2.0
GATHER_S = 1.0
POINTS_AT_ONCE = 900
"""One call a step would take a tenth of two cores; MLflow takes at most 1,000 points a call."""
UNSEEN_S, UNSEEN_ENDED_S = 86400.0, 600.0
"""A journal of another host or container, whose process nobody here can see, is left behind when it has not grown for so long;
the second, when its run has ended and only the sending is left."""


class NotTaken(Exception):
    """The store does not take it, now or ever; the text is its own."""


class Sends(Protocol):
    """Applies one line; raises while the store cannot take it."""

    run_id: str | None

    def send(self, line: dict[str, Any]) -> None: ...

    def close(self) -> None:
        """No more lines."""


class Recorded(Protocol):
    """What other runs and the registry ask of a run."""

    @property
    def run_id(self) -> str | None: ...


class Runs:
    """Starts runs in one experiment of one store. Their lines go where `sender` takes them."""

    experiment_id: str

    def __init__(self, uri: str, spool: Path) -> None:
        self.uri = uri
        self.spool = spool
        spool.mkdir(parents=True, exist_ok=True)

    def sender(self, journal: Path, parent: Recorded | None, asked: bool) -> Sends:
        """`asked`: whether a request that makes the run may have been sent before."""
        raise NotImplementedError

    def close(self) -> None:
        """No more runs."""

    def start_parent(
        self, name: str, tags: Mapping[str, str], under: "Run | None" = None, journal: str | None = None
    ) -> "Run":
        """The run of an invocation; `under` is the run of the sweep that it is a point of. `journal` names one that was started
        by an earlier process and goes on."""
        return self._start(name, tags, under, journal)

    def start_child(self, parent: "Run", name: str, tags: Mapping[str, str]) -> "Run":
        return self._start(name, tags, parent)

    def _start(self, name: str, tags: Mapping[str, str], parent: "Run | None", known: str | None = None) -> "Run":
        create = {
            "op": "create",
            "uri": redacted(self.uri),
            "experiment": self.experiment_id,
            "name": name,
            "tags": {**tags, "raykeel.owner": json.dumps(identity())},
            "parent": parent.journal if parent else None,
        }
        journal = self.spool / f"{known or uuid.uuid4().hex}.jsonl"
        return Run(journal, self.sender(journal, parent, known is not None), create, parent)


class Run:
    """One run behind a journal; the `Tracker` that stages see. Its calls never raise."""

    def __init__(self, path: Path, sender: Sends, create: dict[str, Any], under: "Run | None" = None) -> None:
        """`create` is the first line; it is sent at once when the store answers. `under` is the run that waits for this one."""
        self.path = path
        self.failed: str | None = None
        """Why lines stayed behind, and where; None when the store has them all."""
        self._sender = sender
        self._under = under
        self._below: list[Run] = []
        self._error: str | None = None
        self._failing_since: float | None = None
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._given_up = threading.Event()
        self._ended = False
        self._sent = False
        self._began, self._clock = _now_ms(), time.monotonic()
        create = {**create, "at": self._began, "owner": identity()}
        self._write(create)
        if under is not None:
            under._below.append(self)
        if under is None or under._error is None:  # else it would wait for the same server once more
            with contextlib.suppress(Exception):  # a server that is away now: the thread tries again
                self._send(create)
        if sender.run_id is None:
            self._queue.put(create)
        self._thread = threading.Thread(target=self._drain, name=f"journal-{create['name']}", daemon=True)
        self._thread.start()

    @property
    def run_id(self) -> str | None:
        """The store's id of the run; None while it has not been reached."""
        return self._sender.run_id

    @property
    def journal(self) -> str:
        """Name under which other journals refer to this one."""
        return self.path.stem

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None, at: float | None = None) -> None:
        when = int(at * 1000) if at else _now_ms()
        self._put({"op": "metrics", "points": [[key, float(value), when, step or 0] for key, value in metrics.items()]})

    def log_dataset(
        self,
        name: str,
        artifact: Artifact,
        context: str,
        profile: Mapping[str, float],
        columns: Sequence[dict[str, Any]] = (),
    ) -> None:
        """`columns`: its schema as MLflow writes it (`pipelines/datasets.py`)."""
        digest = artifact.digest[:DATASET_DIGEST_LIMIT]
        facts = {"name": name, "digest": digest, "uri": artifact.uri, "context": context, "profile": dict(profile)}
        self._put({"op": "dataset", **facts, "columns": list(columns)})

    def log_text(self, text: str, path: str) -> None:
        self._put({"op": "text", "text": text, "path": path})

    def log_params(self, params: Mapping[str, str]) -> None:
        self._put({"op": "params", "params": dict(params)})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._put({"op": "tags", "tags": dict(tags)})

    def close(self, status: str) -> None:
        """End the run as FINISHED, FAILED or KILLED. The top run waits a little for a slow server, for itself and all below it;
        then the journals stay behind. A run below another never waits: an outage costs its time once, not once a stage."""
        # By a clock that nobody sets: a run whose machine is put an hour back does not end before it began.
        ended = self._began + int((time.monotonic() - self._clock) * 1000)
        self._put({"op": "end", "status": status, "at": ended})
        self._closing.set()
        self._queue.put(None)
        if self._under is not None:
            return
        family = list(self._family())
        patience = KILLED_TIMEOUT_S if status == "KILLED" else CLOSE_TIMEOUT_S - max(run._outage_s for run in family)
        deadline = time.monotonic() + max(KILLED_TIMEOUT_S, patience)
        for run in family:
            run._thread.join(max(0.0, deadline - time.monotonic()))
        behind = [run for run in family if not run._sent]
        for run in behind:
            run._given_up.set()
        if behind:
            why = next((run._error for run in behind if run._error), "the tracking store is slow")
            count = "this run" if len(behind) == 1 else f"{len(behind)} runs"
            self.failed = f"{why}; the record of {count} is kept in {self.path.parent} and sent at the next run"

    @property
    def _outage_s(self) -> float:
        """For how long the store has taken nothing."""
        return time.monotonic() - self._failing_since if self._failing_since is not None else 0.0

    def _family(self) -> Iterator["Run"]:
        yield self
        for run in self._below:
            yield from run._family()

    def _put(self, line: dict[str, Any]) -> None:
        self._write(line)
        self._queue.put(line)

    def _write(self, line: dict[str, Any]) -> None:
        """A full disk loses the copy on disk, not the stage."""
        try:
            with self._lock, self.path.open("a", encoding="utf-8") as journal:
                journal.write(json.dumps(line) + "\n")
        except OSError as error:
            self.failed = f"{self.path} cannot be written ({error.strerror})"

    def _drain(self) -> None:
        try:
            self._sent = self._send_all()
        finally:
            self._sender.close()
        if self._sent:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)

    def _send_all(self) -> bool:
        """Send all lines in order; False when somebody gave up. Texts that fail come last: they may go to another place, which holds
        no metric up."""
        texts = []
        for line in self._lines():
            if not self._deliver(line, insist=line["op"] != "text"):
                if self._given_up.is_set():
                    return False
                texts.append(line)
        return all(self._deliver(line) for line in texts)

    def _deliver(self, line: dict[str, Any], insist: bool = True) -> bool:
        """Whether the store took the line; insisting means until somebody gives up."""
        while not self._given_up.is_set():
            try:
                self._send(line)
                self._error = self._failing_since = None
                return True
            except Exception as error:
                said = str(error).partition("\n")[0]
                self._error = redacted(said if isinstance(error, NotTaken) else f"{type(error).__name__}: {said}")
                self._failing_since = self._failing_since or time.monotonic()
                if not insist:
                    return False
                self._given_up.wait(RETRY_S)
        return False

    def _send(self, line: dict[str, Any]) -> None:
        self._sender.send(line)
        if line["op"] == "create":
            self._write({"op": "is", "run_id": self._sender.run_id})

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Lines as they come, those of metrics together."""
        following: dict[str, Any] | None = None
        while (line := following or self._queue.get()) is not None:
            following = None
            if line["op"] == "metrics":
                line, following = self._gather(line)
            yield line
            if following is None and self._ended:
                return

    def _gather(self, line: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """A line with the points of the lines that follow it within a second, and the first line of another kind."""
        points = list(line["points"])
        self._closing.wait(GATHER_S)
        while len(points) < POINTS_AT_ONCE:
            try:
                another = self._queue.get_nowait()
            except queue.Empty:
                break
            if another is None:
                self._ended = True
                break
            if another["op"] != "metrics":
                return {"op": "metrics", "points": points}, another
            points += another["points"]
        return {"op": "metrics", "points": points}, None


def journal_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal; what a kill cut short is left out. Empty when the file is gone or holds none."""
    lines = []
    with contextlib.suppress(OSError):
        for text in path.read_text("utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
    return lines if lines and lines[0].get("op") == "create" else []


def left_behind(spool: Path) -> list[tuple[Path, list[dict[str, Any]]]]:
    """Journals of processes that are gone, with their lines."""
    found = [(path, journal_lines(path)) for path in spool.glob("*.jsonl")]
    return [(path, lines) for path, lines in found if lines and _is_left(path, lines)]


def _is_left(path: Path, lines: list[dict[str, Any]]) -> bool:
    owner = lines[0]["owner"]
    if same_host(owner):
        return not is_alive(owner)
    limit = UNSEEN_ENDED_S if lines[-1]["op"] == "end" else UNSEEN_S
    try:
        return time.time() - path.stat().st_mtime > limit
    except FileNotFoundError:
        return False


def _now_ms() -> int:
    return int(time.time() * 1000)
