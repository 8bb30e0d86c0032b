"""Reading the model registry without MLflow. Apart, because a plan may ask two questions of it and must not pay 1.5 s of
CPU for an import: the local store is one SQLite file, a server has a REST interface. Writing is `pipelines/tracking.py`.
"""

import json
import sqlite3
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from pipelines.config import redacted
from stages.contract import ResourcesUnavailable, StageError

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
            tags = self._query(
                "SELECT value FROM model_version_tags WHERE name = ? AND version = ? AND key = 'digest'",
                (name, version),
            )
            source, digest = (rows[0][0] if rows else None), (tags[0][0] if tags else None)
        else:
            found = self._get("model-versions/get", {"name": name, "version": str(version)}).get("model_version", {})
            source = found.get("source")
            digest = {t["key"]: t["value"] for t in found.get("tags", [])}.get("digest")
        if source is None:
            raise StageError(f"{model}: the registry has no version {version} of {name}")
        if digest is None:
            raise StageError(
                f"{model}: this version carries no content digest, so it was not registered by a pipeline here"
            )
        return str(source), str(digest)

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
        connection = sqlite3.connect(f"file:{urllib.parse.quote(str(path))}?mode=ro", uri=True, timeout=10)
        try:
            return connection.execute(sql, values).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return []
            raise ResourcesUnavailable(f"{path}: the registry cannot be read ({error})") from error
        finally:
            connection.close()

    def _get(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        url = f"{self.uri.rstrip('/')}/api/2.0/mlflow/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=self.timeout_s) as answer:
                loaded: dict[str, Any] = json.load(answer)
                return loaded
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return {}
            raise ResourcesUnavailable(f"{redacted(self.uri)}: the registry answered {error.code}") from error
        except OSError as error:
            raise ResourcesUnavailable(
                f"{redacted(self.uri)}: the tracking server cannot be reached ({error})"
            ) from error


def _quoted(name: str) -> str:
    return name.replace("'", "''")
