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
import os
import queue
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.config import plain, redacted
from pipelines.lease import identity, is_alive
from pipelines.registry import RegistryReader
from stages.artifacts import Artifact
from stages.contract import ResourcesUnavailable, StageConfig

PARAM_LIMIT = 500
"""MLflow cuts values over 6,000 characters without a word; longer ones than this are shown by their beginning and digest."""
DATASET_DIGEST_LIMIT = 36
CLOSE_TIMEOUT_S = 30.0
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
        import logging

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

    def start_parent(self, name: str, tags: Mapping[str, str]) -> "Run":
        return Run(self, None, name, {**tags, "raykeel.owner": json.dumps(identity())})

    def start_child(self, parent: "Run", name: str, tags: Mapping[str, str]) -> "Run":
        tags = {**tags, "raykeel.owner": json.dumps(identity())}
        return Run(self, parent, name, tags)

    def _replay(self) -> None:
        """Send what earlier processes could not."""
        for path in sorted(self.spool.glob("*.jsonl")):
            lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.endswith("}")]
            if not lines or is_alive(lines[0]["owner"]):
                continue
            sender = _Sender(self, path)
            for line in lines:
                sender.send(line)
            path.unlink()

    def _reconcile(self) -> None:
        """Close runs that a killed process left RUNNING."""
        running = self.client.search_runs([self.experiment_id], "attributes.status = 'RUNNING'", max_results=1000)
        for run in running:
            owner = run.data.tags.get("raykeel.owner")
            if owner and json.loads(owner)["host"] == identity()["host"] and not is_alive(json.loads(owner)):
                self.client.set_tag(run.info.run_id, "raykeel.ended", "its process was gone; closed by a later run")
                self.client.set_terminated(run.info.run_id, "KILLED")


class Run:
    """One MLflow run behind a journal; the `Tracker` that stages see."""

    def __init__(self, tracking: Tracking, parent: "Run | None", name: str, tags: Mapping[str, str]) -> None:
        self._journal = (tracking.spool / f"{uuid.uuid4().hex}.jsonl").open("a", encoding="utf-8")
        self._path = Path(self._journal.name)
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._sender = _Sender(tracking, self._path)
        self._lock = threading.Lock()
        self.failed: str | None = None
        """Why the server could not be reached, once the journal had to be left behind."""
        create = {"op": "create", "name": name, "tags": dict(tags), "at": _now_ms(), "owner": identity()}
        if parent is not None:
            create["parent"] = parent.run_id
        self._write(create)
        with contextlib.suppress(Exception):  # a server that is away now: the thread tries again
            self._sender.send(create)
        self._thread = threading.Thread(target=self._drain, args=(create,), name=f"mlflow-{name}", daemon=True)
        self._thread.start()

    @property
    def run_id(self) -> str | None:
        """MLflow's id; None while the server has not been reached."""
        return self._sender.run_id

    # The Tracker protocol

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None, at: float | None = None) -> None:
        clean = {key: float(value) for key, value in metrics.items()}
        self._put({"op": "metrics", "metrics": clean, "step": step or 0, "at": int(at * 1000) if at else _now_ms()})

    def log_dataset(self, name: str, artifact: Artifact, context: str, profile: Mapping[str, float]) -> None:
        self._put(
            {
                "op": "dataset",
                "name": name,
                "digest": artifact.digest[:DATASET_DIGEST_LIMIT],
                "uri": artifact.uri,
                "context": context,
                "profile": dict(profile),
            }
        )

    def log_text(self, text: str, path: str) -> None:
        self._put({"op": "text", "text": text, "path": path})

    # For the runner

    def log_params(self, params: Mapping[str, str]) -> None:
        self._put({"op": "params", "params": dict(params)})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._put({"op": "tags", "tags": dict(tags)})

    def close(self, status: str) -> None:
        """End the run as FINISHED, FAILED or KILLED. Waits a little for a slow server, then leaves the journal behind."""
        self._put({"op": "end", "status": status, "at": _now_ms()})
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._journal.close()
        if not self._thread.is_alive() and self._sender.error is None:
            self._path.unlink(missing_ok=True)
        else:
            self.failed = (
                f"{self._sender.error or 'the tracking store is slow'}; kept in {self._path}, sent at the next run"
            )

    def _put(self, line: dict[str, Any]) -> None:
        self._write(line)
        self._queue.put(line)

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._journal.write(json.dumps(line) + "\n")
            self._journal.flush()

    def _drain(self, create: dict[str, Any]) -> None:
        """Send lines in order; on failure wait and try again, until the run is closed."""
        closing = False
        line = create if self._sender.run_id is None else self._queue.get()
        while line is not None:
            try:
                self._sender.send(line)
                self._sender.error = None
            except Exception as error:
                self._sender.error = redacted(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
                closing = closing or line["op"] == "end" or any(item is None for item in list(self._queue.queue))
                if closing:
                    return
                time.sleep(2.0)
                continue
            line = self._queue.get()


class _Sender:
    """Applies journal lines to MLflow. Each can be applied twice."""

    def __init__(self, tracking: Tracking, journal: Path) -> None:
        self._tracking = tracking
        self._journal = journal.stem
        self.run_id: str | None = None
        self.error: str | None = None

    def send(self, line: dict[str, Any]) -> None:
        getattr(self, f"_send_{line['op']}")(line)

    def _send_create(self, line: dict[str, Any]) -> None:
        client, experiment = self._tracking.client, self._tracking.experiment_id
        known = client.search_runs([experiment], f"tags.`raykeel.journal` = '{self._journal}'", max_results=1)
        if known:
            self.run_id = known[0].info.run_id
            return
        tags = {**line["tags"], "raykeel.journal": self._journal}
        if line.get("parent"):
            tags["mlflow.parentRunId"] = line["parent"]
        self.run_id = client.create_run(experiment, start_time=line["at"], tags=tags, run_name=line["name"]).info.run_id

    def _send_metrics(self, line: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        batch = [Metric(key, value, line["at"], line["step"]) for key, value in line["metrics"].items()]
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

    def tag(self, name: str, version: int, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            self._client.set_model_version_tag(name, str(version), key, value)


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


def _now_ms() -> int:
    return int(time.time() * 1000)
