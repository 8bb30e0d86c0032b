"""The record in MLflow: the only module that imports mlflow. Apart, because MLflow is a view: manifests are the state.

One parent run per invocation that did something, one child per executed attempt. Only the driver writes, through a journal:
each call is one JSON line on disk first and is sent by a thread, so that a slow or absent server never stops a stage; what
was not sent by the end is replayed at the next start. Every line can be sent twice without harm (same run, step and time).
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.config import plain, redacted
from pipelines.journal import Run, journal_lines
from pipelines.lease import identity, is_alive
from pipelines.registry import RegistryReader
from stages.artifacts import Artifact
from stages.contract import ResourcesUnavailable, StageConfig

PARAM_LIMIT = 500
"""MLflow cuts values over 6,000 characters without a word; longer ones than this are shown by their beginning and digest."""
NEVER_ACCEPTED = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE")
TRAINING_VIEW = {"mlflow.experimentKind": "custom_model_development"}
"""Opens the UI on runs and curves; its own guess is the view for chat traces."""


class Tracking:
    """An open MLflow store, with this project's experiment."""

    def __init__(self, uri: str, state: Path, experiment: str, timeout_s: float) -> None:
        """Opens the store; raises ResourcesUnavailable within about `timeout_s` when a server does not answer."""
        self.uri = uri
        self.spool = state / "spool"
        self.spool.mkdir(parents=True, exist_ok=True)
        if uri.startswith("http"):
            _require_server(uri, timeout_s)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(int(timeout_s)))
        os.environ.setdefault("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
        import mlflow

        logging.getLogger("mlflow").setLevel(logging.ERROR)
        logging.getLogger("alembic").setLevel(logging.ERROR)
        if uri.startswith("sqlite:///"):
            Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        # Several first users of a fresh SQLite file break each other's schema migration for good.
        with (self.spool / "first-use.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            mlflow.set_tracking_uri(uri)
            self.client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
            self.experiment_id = self._experiment(experiment, state)
            self._replay()
            self._reconcile()

    def _experiment(self, name: str, state: Path) -> str:
        found = self.client.get_experiment_by_name(name)
        if found is None:
            if self.uri.startswith("http"):
                return str(self.client.create_experiment(name, tags=TRAINING_VIEW))
            place = state / "mlflow" / "artifacts" / name
            place.mkdir(parents=True, exist_ok=True)
            return str(self.client.create_experiment(name, artifact_location=place.as_uri(), tags=TRAINING_VIEW))
        if found.lifecycle_stage == "deleted":
            raise ResourcesUnavailable(
                f"the MLflow experiment '{name}' was deleted: restore it (mlflow experiments restore -x {found.experiment_id}) "
                f"or choose another with tracking.experiment=<name>"
            )
        location = urllib.parse.urlparse(found.artifact_location)
        if location.scheme == "file" and not Path(urllib.parse.unquote(location.path)).exists():
            raise ResourcesUnavailable(
                f"the MLflow experiment '{name}' stores artifacts under {location.path}, which does not exist (was the directory "
                f"moved?): move it back or choose another experiment with tracking.experiment=<name>"
            )
        return str(found.experiment_id)

    def start_parent(self, name: str, tags: Mapping[str, str]) -> Run:
        return self._start(name, tags, None)

    def start_child(self, parent: Run, name: str, tags: Mapping[str, str]) -> Run:
        return self._start(name, tags, parent)

    def _start(self, name: str, tags: Mapping[str, str], parent: Run | None) -> Run:
        create = {
            "op": "create",
            "uri": redacted(self.uri),
            "experiment": self.experiment_id,
            "name": name,
            "tags": {**tags, "raykeel.owner": json.dumps(identity())},
            "parent": parent.journal if parent else None,
        }
        journal = self.spool / f"{uuid.uuid4().hex}.jsonl"
        return Run(journal, Sender(self, journal), create)

    def _replay(self) -> None:
        """Send what earlier processes could not, oldest first, so that a parent exists before its children."""
        left = []
        for path in self.spool.glob("*.jsonl"):
            lines = journal_lines(path)
            if lines and not is_alive(lines[0]["owner"]) and lines[0]["uri"] == redacted(self.uri):
                left.append((lines[0]["at"], path, lines))
        for _, path, lines in sorted(left, key=lambda item: item[0]):
            sender = Sender(self, path)
            try:
                for line in lines:
                    sender.send(line)
            except Exception as error:
                logging.getLogger(__name__).warning("%s is kept for the next run: %s", path, redacted(str(error)))
            else:
                path.unlink(missing_ok=True)

    def _reconcile(self) -> None:
        """Close runs that a killed process of this host left RUNNING, in whichever experiment."""
        experiments = [e.experiment_id for e in self.client.search_experiments()]
        for run in self.client.search_runs(experiments, "attributes.status = 'RUNNING'", max_results=1000):
            owner = json.loads(run.data.tags.get("raykeel.owner", "{}"))
            if owner.get("host") == identity()["host"] and not is_alive(owner):
                self.client.set_tag(run.info.run_id, "raykeel.ended", "its process was gone; closed by a later run")
                self.client.set_terminated(run.info.run_id, "KILLED")


class Sender:
    """Applies journal lines to MLflow. Each can be applied twice."""

    def __init__(self, tracking: Tracking, journal: Path) -> None:
        self._tracking = tracking
        self._journal = journal.stem
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
            logging.getLogger(__name__).warning("MLflow refuses a %s line: %s", line["op"], redacted(str(error)))

    def _send_create(self, line: dict[str, Any]) -> None:
        self.run_id = self._find(self._journal, line["experiment"])
        if self.run_id is not None:
            return
        tags = {**line["tags"], "raykeel.journal": self._journal}
        parent = self._find(line["parent"], line["experiment"]) if line["parent"] else None
        if parent:
            tags["mlflow.parentRunId"] = parent
        made = self._tracking.client.create_run(
            line["experiment"], start_time=line["at"], tags=tags, run_name=line["name"]
        )
        self.run_id = made.info.run_id

    def _find(self, journal: str, experiment: str) -> str | None:
        query = f"tags.`raykeel.journal` = '{journal}'"
        found = self._tracking.client.search_runs([experiment], query, max_results=1)
        return str(found[0].info.run_id) if found else None

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
            source_type="local",
            source=json.dumps({"uri": line["uri"]}),
            schema=None,
            profile=json.dumps(line["profile"]),
        )
        context = InputTag("mlflow.data.context", line["context"])
        self._tracking.client.log_inputs(self.run_id, [DatasetInput(dataset, [context])])

    def _send_end(self, line: dict[str, Any]) -> None:
        self._tracking.client.set_terminated(self.run_id, line["status"], line["at"])


class MlflowRegistry(RegistryReader):
    """The full `stages.contract.Registry`: reading as planned, writing through MLflow."""

    def __init__(self, tracking: Tracking, run: Run) -> None:
        super().__init__(tracking.uri)
        self._client = tracking.client
        self._run = run

    def register(self, name: str, model: Artifact, tags: Mapping[str, str], metrics: Mapping[str, float]) -> int:
        from mlflow.exceptions import MlflowException

        shown = {**{key: f"{value:.6g}" for key, value in metrics.items()}, **tags, "digest": model.digest}
        try:
            with contextlib.suppress(MlflowException):
                self._client.create_registered_model(name)
            version = self._client.create_model_version(name, source=model.uri, run_id=self._run.run_id, tags=shown)
        except MlflowException as error:
            raise ResourcesUnavailable(f"models:/{name}: the registry refused the version ({error})") from error
        return int(version.version)

    def set_alias(self, name: str, alias: str, version: int) -> None:
        self._client.set_registered_model_alias(name, alias, str(version))


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


def _require_server(uri: str, timeout_s: float) -> None:
    """MLflow's own client retries a dead address for minutes."""
    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=timeout_s).close()
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise ResourcesUnavailable(f"tracking.uri={redacted(uri)}: the server answers {error.code}") from error
    except (OSError, ValueError) as error:
        raise ResourcesUnavailable(
            f"tracking.uri={redacted(uri)}: no MLflow server answers within {timeout_s:.0f} s ({error}); start it, or use tracking=local"
        ) from error
