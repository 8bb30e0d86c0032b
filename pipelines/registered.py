"""All models, versions and aliases of the registry, read without MLflow. Apart from `pipelines/registry.py`, whose few questions are part
of every plan: what is asked here goes through the whole registry, to keep, check and show it.
"""

from dataclasses import dataclass
from typing import Any

from pipelines.config import AppConfig
from pipelines.registry import RegistryReader, tracking_uri

DELETED = "Deleted_Internal"
"""MLflow keeps the row of a deleted version under this stage."""
PAGE = "500"


@dataclass(frozen=True)
class Version:
    """A registered model version."""

    model: str
    number: int
    digest: str | None
    """Content digest of the weights; None when no pipeline here registered it."""

    def __str__(self) -> str:
        return f"{self.model}@{self.number}"


@dataclass(frozen=True)
class Registered:
    """The registry at one moment."""

    versions: dict[tuple[str, int], Version]
    aliases: dict[tuple[str, str], int]
    """(model, alias) -> version, which may not exist."""

    def of(self, model: str, number: int) -> list[str]:
        """The aliases of a version."""
        return sorted(alias for (name, alias), version in self.aliases.items() if (name, version) == (model, number))


def read(app: AppConfig) -> Registered:
    """Raises ResourcesUnavailable when the registry cannot be read: whoever cleans up must not take that for an empty one."""
    reader = _Reader(tracking_uri(app.tracking.uri, app.state_root), app.tracking.timeout_s)
    versions, aliases = reader.everything()
    return Registered(
        {(name, number): Version(name, number, digest) for name, number, digest in versions},
        {(name, alias): number for name, alias, number in aliases},
    )


class _Reader(RegistryReader):
    def everything(self) -> tuple[list[tuple[str, int, str | None]], list[tuple[str, str, int]]]:
        """[(model, version, digest)], [(model, alias, version)]."""
        return self._from_sqlite() if self._sqlite else self._from_server()

    def _from_sqlite(self) -> Any:
        versions = self._query(
            "SELECT v.name, v.version, t.value FROM model_versions v LEFT JOIN model_version_tags t"
            " ON t.name = v.name AND t.version = v.version AND t.key = 'digest' WHERE coalesce(v.current_stage, '') <> ?",
            (DELETED,),
        )
        aliases = self._query("SELECT name, alias, version FROM registered_model_aliases", ())
        return [(n, int(v), d) for n, v, d in versions], [(n, a, int(v)) for n, a, v in aliases]

    def _from_server(self) -> Any:
        versions, aliases = [], []
        for found in self._pages("model-versions/search", "model_versions"):
            tags = {tag["key"]: tag["value"] for tag in found.get("tags", [])}
            versions.append((found["name"], int(found["version"]), tags.get("digest")))
        for model in self._pages("registered-models/search", "registered_models"):
            aliases += [(model["name"], a["alias"], int(a["version"])) for a in model.get("aliases", [])]
        return versions, aliases

    def _pages(self, path: str, what: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        token = ""
        while True:
            answer = self._get(path, {"max_results": PAGE, **({"page_token": token} if token else {})})
            found += answer.get(what, [])
            token = answer.get("next_page_token", "")
            if not token:
                return found
