"""The record in MLflow: the only module that imports mlflow. Apart, because MLflow is a view: manifests are the state.

One parent run per invocation that did something, one child per executed attempt. Only the driver writes, through a journal:
each call is one JSON line on disk first and is sent by a thread, so that a slow or absent server never stops a stage; what
was not sent by the end is replayed at the next start. Every line can be sent twice without harm (same run, step and time);
a run that was made twice, because the answer to the first request was lost, is found by its journal's name and taken away.
"""

import dataclasses
import fcntl
import gc
import hashlib
import json
import logging
import os
import urllib.error
import urllib.parse
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipelines.config import plain, redacted
from pipelines.journal import Run, journal_lines, left_behind
from pipelines.lease import identity, is_alive, same_host
from pipelines.registering import NEVER_ACCEPTED, PATIENCE_S, patiently
from pipelines.registry import fetch
from stages.contract import ResourcesUnavailable, StageConfig

PARAM_LIMIT = 500
"""MLflow cuts values over 6,000 characters without a word; longer ones than this are shown by their beginning and digest."""
TRAINING_VIEW = {"mlflow.experimentKind": "custom_model_development"}
"""Opens the UI on runs and curves; its own guess is the view for chat traces."""
_log = logging.getLogger(__name__)


class Tracking:
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
        self.uri = uri
        self._maker_of = maker_of
        self.spool = state / "spool"
        self.spool.mkdir(parents=True, exist_ok=True)
        server = uri.startswith("http")
        if server:
            _require_server(uri, timeout_s)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"  # a request that is repeated blindly makes a run twice
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(max(1, int(timeout_s)))
        os.environ.setdefault("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
        gc.disable()  # 1.5 s of CPU, a sixth of it looking for garbage among modules that stay
        try:
            import mlflow
        finally:
            gc.enable()

        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
        # It prints what it raises, with a traceback; a lock that passes is no news.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        if uri.startswith("sqlite:///"):
            Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        # Several first users of a fresh SQLite file break each other's schema migration for good.
        with (self.spool / "first-use.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            mlflow.set_tracking_uri(uri)
            patience = timeout_s if server else PATIENCE_S
            shown = f"tracking.uri={redacted(uri)}"
            self.client = patiently(lambda: mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri), patience, shown)
            place = artifacts or (state / "mlflow" / "artifacts").as_uri()
            found = patiently(lambda: self._experiment(experiment, None if server else place), patience, shown)
            self.experiment_id = _usable(found)
            self._replay()
            self._reconcile()

    def _experiment(self, name: str, place: str | None) -> Any:
        """The experiment, made with its artifacts below `place` when it does not exist."""
        from mlflow.exceptions import MlflowException

        if (found := self.client.get_experiment_by_name(name)) is not None:
            return found
        location = f"{place}/{urllib.parse.quote(name)}" if place else None
        if location and location.startswith("file:"):
            _local(location).mkdir(parents=True, exist_ok=True)
        try:
            self.client.create_experiment(name, artifact_location=location, tags=TRAINING_VIEW)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # made by another client meanwhile
                raise
        return self.client.get_experiment_by_name(name)

    def start_parent(
        self, name: str, tags: Mapping[str, str], under: Run | None = None, journal: str | None = None
    ) -> Run:
        """The run of an invocation; `under` is the run of the sweep that it is a point of. `journal` names one that was started
        by an earlier process and goes on."""
        return self._start(name, tags, under, journal)

    def start_child(self, parent: Run, name: str, tags: Mapping[str, str]) -> Run:
        return self._start(name, tags, parent)

    def _start(self, name: str, tags: Mapping[str, str], parent: Run | None, known: str | None = None) -> Run:
        create = {
            "op": "create",
            "uri": redacted(self.uri),
            "experiment": self.experiment_id,
            "name": name,
            "tags": {**tags, "raykeel.owner": json.dumps(identity())},
            "parent": parent.journal if parent else None,
        }
        journal = self.spool / f"{known or uuid.uuid4().hex}.jsonl"
        return Run(journal, Sender(self, journal, parent, asked=known is not None), create, parent)

    def _replay(self) -> None:
        """Send what earlier processes could not, oldest first, so that a parent exists before its children; texts last."""
        left = [item for item in left_behind(self.spool) if item[1][0]["uri"] == redacted(self.uri)]
        for path, lines in sorted(left, key=lambda item: item[1][0]["at"]):
            sender = Sender(self, path)
            sender.run_id = next((line["run_id"] for line in lines if line["op"] == "is"), None)
            try:
                for line in sorted(lines, key=lambda line: line["op"] == "text"):
                    sender.send(line)
            except Exception as error:
                _log.warning("%s is kept for the next run: %s", path, redacted(str(error)))
            else:
                path.unlink(missing_ok=True)

    def _reconcile(self) -> None:
        """Close runs that a killed process of this host left RUNNING, in whichever experiment."""
        try:
            experiments = [e.experiment_id for e in self.client.search_experiments()]
            for run in self.client.search_runs(experiments, "attributes.status = 'RUNNING'", max_results=1000):
                owner = json.loads(run.data.tags.get("raykeel.owner", "{}"))
                if not same_host(owner) or is_alive(owner):
                    continue
                made = self.of_journal(run.data.tags.get("raykeel.journal", ""), run.info.experiment_id)
                if len(made) > 1 and not run.data.metrics and not run.data.params:
                    self.client.delete_run(run.info.run_id)  # made twice: the request came through, its answer did not
                    continue
                fingerprint = run.data.tags.get("raykeel.fingerprint")
                published = bool(fingerprint) and self._maker_of(fingerprint) == run.info.run_id
                how = "after its result was published" if published else "before it ended"
                self.client.set_tag(
                    run.info.run_id, "raykeel.ended", f"its process was gone {how}; closed by a later run"
                )
                self.client.set_terminated(run.info.run_id, "FINISHED" if published else "KILLED")
        except Exception as error:  # an untidy list is no reason not to run
            _log.warning("runs left RUNNING could not be looked for: %s", redacted(str(error)))

    def of_journal(self, journal: str, experiment: str) -> list[str]:
        """Ids of the runs that were made for a journal: none or one, more when answers were lost."""
        if not journal:
            return []
        found = self.client.search_runs([experiment], f"tags.`raykeel.journal` = '{journal}'", max_results=100)
        return [str(run.info.run_id) for run in found]


class Sender:
    """Applies journal lines to MLflow. Each can be applied twice."""

    def __init__(self, tracking: Tracking, journal: Path, parent: Run | None = None, asked: bool = True) -> None:
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


def changed_params(cfg: StageConfig) -> dict[str, str]:
    """Flat name -> value of the fields that differ from their defaults (and those that have none)."""
    params: dict[str, str] = {}

    def visit(value: Any, where: str) -> None:
        for f in dataclasses.fields(value):
            item, name = getattr(value, f.name), f"{where}{f.name}"
            default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
            if item == default or name == "inputs":
                continue
            if dataclasses.is_dataclass(item):
                visit(item, f"{name}.")
            else:
                params[name] = _shown(plain(item))

    visit(cfg, "")
    return params


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= PARAM_LIMIT:
        return text
    return f"{text[:200]}... ({len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}; whole in config.json)"


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


def _require_server(uri: str, timeout_s: float) -> None:
    """MLflow's own client retries a dead address for minutes."""
    try:
        fetch(f"{uri.rstrip('/')}/health", timeout_s)
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise ResourcesUnavailable(f"tracking.uri={redacted(uri)}: the server answers {error.code}") from error
    except (OSError, ValueError) as error:
        raise ResourcesUnavailable(
            f"tracking.uri={redacted(uri)}: no MLflow server answers within {timeout_s:.0f} s ({redacted(str(error))}); start it, "
            "or use tracking=local"
        ) from error
