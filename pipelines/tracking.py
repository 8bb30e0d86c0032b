"""The record in MLflow: the only module that imports mlflow. Apart, because MLflow is a view: manifests are the state.

One parent run per invocation that did something, one child per executed attempt. Only the driver writes, through a journal:
each call is one JSON line on disk first and is handed on by a thread, so that a slow or absent server never stops a stage; what
was not sent by the end is replayed at the next start. The process that takes the lines and has this module in it is the scribe
(`pipelines/scribe.py`). Every line can be sent twice without harm (same run, step and time); a run that was made twice, because the
answer to the first request was lost, is found by its journal's name and taken away.
"""

import contextlib
import fcntl
import gc
import json
import logging
import os
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipelines import settling
from pipelines.config import redacted
from pipelines.journal import Recorded, Runs, journal_lines
from pipelines.registering import NEVER_ACCEPTED, PATIENCE_S, MlflowRegistry, patiently
from pipelines.registry import require_server
from stages.contract import ResourcesUnavailable

TRAINING_VIEW = {"mlflow.experimentKind": "custom_model_development"}
"""Opens the UI on runs and curves; its own guess is the view for chat traces."""
_log = logging.getLogger(__name__)


class Tracking(Runs):
    """An open MLflow store, with this project's experiment."""

    def __init__(
        self,
        uri: str,
        state: Path,
        experiment: str,
        timeout_s: float,
        artifacts: str | None = None,
        maker_of: Callable[[str], str | None] = lambda fingerprint: None,
    ) -> None:
        """Opens the store; raises ResourcesUnavailable within about `timeout_s` when a server does not answer. `artifacts` is
        the URI below which a new experiment of a local store keeps its files; default: the state directory. `maker_of` gives
        the id of the run that published the result of a fingerprint."""
        super().__init__(uri, state / "spool")
        self._state, self._name, self._place, self._maker_of = state, experiment, artifacts, maker_of
        self._is_server = uri.startswith("http")
        self._patience_s = timeout_s if self._is_server else PATIENCE_S
        if self._is_server:
            require_server(uri, timeout_s)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"  # a request that is repeated blindly makes a run twice
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(max(1, int(timeout_s)))
        os.environ.setdefault("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
        load()
        self.client: Any = None
        self._file: tuple[int, int] | None = None
        self.renew()

    def renew(self) -> None:
        """Make sure that this store can be written to, now, and bring it up to date: once for each run that will write."""
        shown = f"tracking.uri={redacted(self.uri)}"
        with self._alone():
            if self.client is None:
                self.client = patiently(self._connected, self._patience_s, shown)
            found = patiently(self._experiment, self._patience_s, shown)
            self.experiment_id = _usable(found)
            self._file = self._file or self._file_now()
        self.settle()

    def settle(self) -> None:
        """Send what killed processes left unsent, and close the runs that they left open."""
        with self._alone():
            settling.replay(self)
            settling.reconcile(self, self._maker_of)

    @property
    def is_ghost(self) -> bool:
        """Whether the local database that is open here is not, or not any more, the one at its path."""
        return self._file is not None and self._file_now() != self._file

    def _file_now(self) -> tuple[int, int] | None:
        if not self.uri.startswith("sqlite:///"):
            return None
        try:
            status = Path(self.uri.removeprefix("sqlite:///")).stat()
        except OSError:
            return (0, 0)
        return status.st_dev, status.st_ino

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Several first users of a fresh SQLite file break each other's schema migration for good."""
        with (self.spool / "first-use.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _connected(self) -> Any:
        import mlflow

        if self.uri.startswith("sqlite:///"):
            Path(self.uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        mlflow.set_tracking_uri(self.uri)
        return mlflow.MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def _experiment(self) -> Any:
        """The experiment; one of a local store is made with its artifacts where the store's are."""
        from mlflow.exceptions import MlflowException

        if (found := self.client.get_experiment_by_name(self._name)) is not None:
            return found
        place = self._place or (self._state / "mlflow" / "artifacts").as_uri()
        location = None if self._is_server else f"{place}/{urllib.parse.quote(self._name)}"
        if location and location.startswith("file:"):
            _local(location).mkdir(parents=True, exist_ok=True)
        try:
            self.client.create_experiment(self._name, artifact_location=location, tags=TRAINING_VIEW)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # made by another client meanwhile
                raise
        return self.client.get_experiment_by_name(self._name)

    def sender(self, journal: Path, parent: Recorded | None, asked: bool) -> "Sender":
        return Sender(self, journal, parent, asked)

    def registry(self, run: Recorded) -> MlflowRegistry:
        """The model registry; what is registered is shown as made by `run`."""
        return MlflowRegistry(self, run)

    def ended_point(self, sweep: str, number: int) -> dict[str, str] | None:
        """Tags of the run of a sweep's point that came to its end; None when there is none. `sweep` is the id of the run above."""
        query = f"tags.`mlflow.parentRunId` = '{sweep}' and tags.`raykeel.point` = '{number}'"
        shown = f"tracking.uri={redacted(self.uri)}"
        found = patiently(lambda: self.client.search_runs([self.experiment_id], query), PATIENCE_S, shown)
        ended = (run for run in found if run.info.status == "FINISHED" or "raykeel.pruned" in run.data.tags)
        return next((dict(run.data.tags) for run in ended), None)

    def of_journal(self, journal: str, experiment: str) -> list[str]:
        """Ids of the runs that were made for a journal: none or one, more when answers were lost."""
        if not journal:
            return []
        found = self.client.search_runs([experiment], f"tags.`raykeel.journal` = '{journal}'", max_results=100)
        return [str(run.info.run_id) for run in found]


class Sender:
    """Applies journal lines to MLflow. Each can be applied twice."""

    def __init__(self, tracking: Tracking, journal: Path, parent: Recorded | None = None, asked: bool = True) -> None:
        """Without `parent`, the run above is looked for by the name of its journal. `asked`: whether a request that makes this
        run may have been sent before."""
        self._tracking = tracking
        self._journal = journal.stem
        self._parent = parent
        self._experiment = tracking.experiment_id
        self._twice = self._asked = asked
        self.run_id: str | None = None

    def send(self, line: dict[str, Any]) -> None:
        """Raises while the server cannot take it; what the server will never take is dropped with a line in the log."""
        from mlflow.exceptions import MlflowException

        try:
            getattr(self, f"_send_{line['op']}")(line)
        except MlflowException as error:
            if error.error_code not in NEVER_ACCEPTED or self.run_id is None:
                raise
            points = line.get("points", [])
            if len(points) > 1:  # one bad name among many
                for point in points:
                    self.send({"op": "metrics", "points": [point]})
                return
            _log.warning("MLflow refuses a %s line: %s", line["op"], redacted(str(error)))

    def close(self) -> None:
        """Nothing is held for it."""

    def _send_create(self, line: dict[str, Any]) -> None:
        if self.run_id is None and self._asked:
            self.run_id = next(iter(self._tracking.of_journal(self._journal, line["experiment"])), None)
        if self.run_id is not None:
            self._reopen(line)
            return
        tags = {**line["tags"], "raykeel.journal": self._journal}
        parent = self._parent_id(line)
        if parent:
            tags["mlflow.parentRunId"] = parent
        self._twice, self._asked = self._asked, True
        made = self._tracking.client.create_run(
            line["experiment"], start_time=line["at"], tags=tags, run_name=line["name"]
        )
        self.run_id = made.info.run_id

    def _reopen(self, line: dict[str, Any]) -> None:
        """A run that an earlier process made goes on, or is replayed; its end is told by a line of its own."""
        from mlflow.entities import RunTag

        client = self._tracking.client
        client.log_batch(self.run_id, tags=[RunTag("raykeel.owner", json.dumps(line["owner"]))])
        client.update_run(self.run_id, status="RUNNING")

    def _send_is(self, line: dict[str, Any]) -> None:
        """The journal's own memory of what the store called the run."""

    def _parent_id(self, line: dict[str, Any]) -> str | None:
        """Raises LookupError while the run above is still to be made."""
        if line["parent"] is None:
            return None
        if self._parent is not None:
            if self._parent.run_id is None:
                raise LookupError("the run above this one is not recorded yet")
            return self._parent.run_id
        above = journal_lines(self._tracking.spool / f"{line['parent']}.jsonl")
        found = [str(one["run_id"]) for one in above if one["op"] == "is"]
        found = found or self._tracking.of_journal(line["parent"], line["experiment"])
        if not found and above:
            raise LookupError("the run above this one is not recorded yet")
        return found[0] if found else None

    def _send_metrics(self, line: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        batch = [Metric(key, value, at, step) for key, value, at, step in line["points"]]
        self._tracking.client.log_batch(self.run_id, metrics=batch)

    def _send_params(self, line: dict[str, Any]) -> None:
        from mlflow.entities import Param

        items = list(line["params"].items())
        for start in range(0, len(items), 100):
            params = [Param(key, value) for key, value in items[start : start + 100]]
            self._tracking.client.log_batch(self.run_id, params=params)

    def _send_tags(self, line: dict[str, Any]) -> None:
        from mlflow.entities import RunTag

        self._tracking.client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in line["tags"].items()])

    def _send_text(self, line: dict[str, Any]) -> None:
        self._tracking.client.log_text(self.run_id, line["text"], line["path"])

    def _send_dataset(self, line: dict[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=line["name"],
            digest=line["digest"],
            source_type="local" if line["uri"].startswith("file:") else line["uri"].partition(":")[0],
            source=json.dumps({"uri": line["uri"]}),
            schema=json.dumps({"mlflow_colspec": line["columns"]}) if line.get("columns") else None,
            profile=json.dumps(line["profile"]),
        )
        context = InputTag("mlflow.data.context", line["context"])
        self._tracking.client.log_inputs(self.run_id, [DatasetInput(dataset, [context])])

    def _send_end(self, line: dict[str, Any]) -> None:
        if self._twice:
            for run_id in self._tracking.of_journal(self._journal, self._experiment):
                if run_id != self.run_id:
                    self._tracking.client.delete_run(run_id)
        self._tracking.client.set_terminated(self.run_id, line["status"], line["at"])


def _local(location: str) -> Path:
    return Path(urllib.parse.unquote(urllib.parse.urlparse(location).path))


def _usable(experiment: Any) -> str:
    """The experiment's id. Raises ResourcesUnavailable when nothing can be recorded in it."""
    if experiment.lifecycle_stage == "deleted":
        raise ResourcesUnavailable(
            f"the MLflow experiment '{experiment.name}' was deleted: restore it (mlflow experiments restore "
            f"-x {experiment.experiment_id}) or choose another with tracking.experiment=<name>"
        )
    location = str(experiment.artifact_location)
    if location.startswith("file:") and not _local(location).exists():
        raise ResourcesUnavailable(
            f"the MLflow experiment '{experiment.name}' stores artifacts under {_local(location)}, which does not exist (was the "
            f"directory moved?): move it back or choose another experiment with tracking.experiment=<name>"
        )
    return str(experiment.experiment_id)


def load() -> None:
    """Import MLflow, which takes 1.5 s of CPU, a sixth of it looking for garbage among modules that stay."""
    gc.disable()
    try:
        import mlflow  # noqa: F401
    finally:
        gc.enable()
    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # It prints what it raises, with a traceback; a lock that passes is no news.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
