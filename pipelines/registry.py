"""Reading the model registry without MLflow. Apart, because a plan may ask two questions of it and must not pay 1.5 s of
CPU for an import: the local store is one SQLite file, a server has a REST interface. Writing is `pipelines/tracking.py`.
"""

import base64
import json
import os
import sqlite3
import threading
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from pipelines.config import redacted
from stages.contract import ResourcesUnavailable, StageError

LOCKED_S = 30.0
"""How long a reader waits for a SQLite file that another process has locked."""
ALIASES = ("candidate", "champion", "previous")


def tracking_uri(configured: str | None, state: Path) -> str:
    """The MLflow tracking URI: the configured server, or a SQLite file under the state root."""
    return configured or f"sqlite:///{state / 'mlflow' / 'mlflow.db'}"


class RegistryReader:
    """The reading half of `stages.contract.Registry` on a tracking URI (sqlite:///... or http://...)."""

    def __init__(self, uri: str, timeout_s: float = 10.0) -> None:
        self.uri = uri
        self.timeout_s = timeout_s

    def find(self, name: str, digest: str) -> int | None:
        """The newest version of `name` tagged with this digest, or None."""
        if self._sqlite:
            rows = self._query(
                "SELECT v.version FROM model_versions v JOIN model_version_tags t"
                " ON t.name = v.name AND t.version = v.version"
                " WHERE v.name = ? AND t.key = 'digest' AND t.value = ? ORDER BY v.version DESC",
                (name, digest),
            )
            return int(rows[0][0]) if rows else None
        where = f"name='{_quoted(name)}' AND tags.digest='{digest}'"
        found = self._get("model-versions/search", {"filter": where}).get("model_versions", [])
        return max((int(v["version"]) for v in found), default=None)

    def alias(self, name: str, alias: str) -> int | None:
        """The version an alias points at, or None."""
        if self._sqlite:
            rows = self._query(
                "SELECT version FROM registered_model_aliases WHERE name = ? AND alias = ?", (name, alias)
            )
            return int(rows[0][0]) if rows else None
        found = self._get("registered-models/alias", {"name": name, "alias": alias}).get("model_version")
        return int(found["version"]) if found else None

    def resolve(self, model: str) -> tuple[str, str]:
        """`models:/name@alias` or `models:/name/3` -> (uri of the directory, content digest)."""
        name, version = self._name_and_version(model)
        if self._sqlite:
            rows = self._query("SELECT source FROM model_versions WHERE name = ? AND version = ?", (name, version))
            tags = dict(
                self._query("SELECT key, value FROM model_version_tags WHERE name = ? AND version = ?", (name, version))
            )
            source = rows[0][0] if rows else None
        else:
            found = self._get("model-versions/get", {"name": name, "version": str(version)}).get("model_version", {})
            source, tags = found.get("source"), {t["key"]: t["value"] for t in found.get("tags", [])}
        digest = tags.get("digest")
        if source is None:
            raise StageError(f"{model}: the registry has no version {version} of {name}")
        if digest is None:
            raise StageError(
                f"{model}: this version carries no content digest, so it was not registered by a pipeline here"
            )
        return str(tags.get("uri", source)), str(digest)  # a server does not take every place as a source

    def latest_run(self) -> tuple[str, str, str] | None:
        """(experiment id, run id, name) of the newest pipeline run in a local store, or None."""
        rows = self._query(
            "SELECT r.experiment_id, r.run_uuid, r.name FROM runs r JOIN tags t ON t.run_uuid = r.run_uuid"
            " WHERE t.key = 'raykeel.kind' AND t.value = 'pipeline' ORDER BY r.start_time DESC LIMIT 1",
            (),
        )
        return (str(rows[0][0]), str(rows[0][1]), str(rows[0][2])) if rows else None

    def _name_and_version(self, model: str) -> tuple[str, int]:
        rest = model.removeprefix("models:/")
        if "@" in rest:
            name, _, alias = rest.partition("@")
            version = self.alias(name, alias)
            if version is None:
                raise StageError(
                    f"{model}: no version of '{name}' has the alias '{alias}'; run the pipeline that makes it first"
                )
            return name, version
        name, _, number = rest.rpartition("/")
        if not name or not number.isdigit():
            raise StageError(f"{model}: a registry model is written models:/name@alias or models:/name/3")
        return name, int(number)

    @property
    def _sqlite(self) -> bool:
        return self.uri.startswith("sqlite:///")

    def _query(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        path = Path(self.uri.removeprefix("sqlite:///"))
        if not path.exists():
            return []
        connection = sqlite3.connect(f"file:{urllib.parse.quote(str(path))}?mode=ro", uri=True, timeout=LOCKED_S)
        try:
            return connection.execute(sql, values).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return []
            raise ResourcesUnavailable(f"{path}: the registry cannot be read ({error})") from error
        finally:
            connection.close()

    def _get(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        """The answer of the REST interface; empty when what was asked for does not exist."""
        url = f"{self.uri.rstrip('/')}/api/2.0/mlflow/{path}?{urllib.parse.urlencode(query)}"
        try:
            loaded: dict[str, Any] = json.loads(fetch(url, self.timeout_s))
            return loaded
        except urllib.error.HTTPError as error:
            if error.code == 404 or (error.code == 400 and b" not found" in error.read()):  # 400: an unknown alias
                return {}
            raise ResourcesUnavailable(f"{redacted(self.uri)}: the registry answered {error.code}") from error
        except (OSError, ValueError) as error:
            raise ResourcesUnavailable(
                f"{redacted(self.uri)}: the tracking server cannot be reached ({redacted(str(error))})"
            ) from error


def fetch(url: str, timeout_s: float) -> bytes:
    """The body at a URL, with the user name and password in it, or those that MLflow's own client reads from the environment.
    Raises OSError (HTTPError for a status of 400 and above). A name that does not resolve is given up in time too."""
    parts = urllib.parse.urlsplit(url)
    user, password = parts.username, parts.password
    request = urllib.request.Request(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
    user, password = (
        user or os.environ.get("MLFLOW_TRACKING_USERNAME"),
        password or os.environ.get("MLFLOW_TRACKING_PASSWORD"),
    )
    if user and password:
        pair = f"{urllib.parse.unquote(user)}:{urllib.parse.unquote(password)}".encode()
        request.add_header("Authorization", f"Basic {base64.b64encode(pair).decode()}")
    elif token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    came: list[bytes | Exception] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                came.append(answer.read())
        except Exception as error:
            came.append(error)

    # The resolver has a timeout of its own, often longer; a server that sends a byte now and then has none at all.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout_s)
    if not came:
        raise TimeoutError("timed out")
    if isinstance(came[0], Exception):
        raise came[0]
    return came[0]


def require_server(uri: str, timeout_s: float) -> None:
    """Raises ResourcesUnavailable within about `timeout_s`: MLflow's own client retries a dead address for minutes."""
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


def _quoted(name: str) -> str:
    return name.replace("'", "''")
