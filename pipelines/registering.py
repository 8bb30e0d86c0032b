"""Writing the model registry, and waiting out its short outages. Apart from `pipelines/tracking.py`, because a journal can wait for
a server and a stage that needs the answer cannot. Runs in the scribe.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pipelines.config import redacted
from pipelines.journal import Recorded
from pipelines.registry import RegistryReader
from stages.artifacts import Artifact
from stages.contract import ResourcesUnavailable

NEVER_ACCEPTED = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE")
PATIENCE_S = 70.0
"""How long a caller who needs the answer (the registry, a start on SQLite) tries again: longer than a lock held for a minute."""
TRY_AGAIN_S = 1.0
T = TypeVar("T")


class MlflowRegistry(RegistryReader):
    """The full `stages.contract.Registry`: reading as planned, writing through MLflow. A short outage is waited out."""

    def __init__(self, tracking: Any, run: Recorded, asked: bool = False) -> None:
        """`asked`: whether a version may have been made before by a request whose answer was lost."""
        super().__init__(tracking.uri)
        self._client = tracking.client
        self._run = run
        self._asked = asked

    def register(self, name: str, model: Artifact, tags: Mapping[str, str], metrics: Mapping[str, float]) -> int:
        """Make a version of `name`, whole in one step: a reader sees it with its digest and `uri` or not at all."""
        shown = {key: f"{value:.6g}" for key, value in metrics.items()}
        shown |= {**tags, "digest": model.digest, "uri": model.uri}

        def make() -> int:
            if self._asked and (found := RegistryReader.find(self, name, model.digest)) is not None:
                return found  # the first request came through, its answer did not
            self._asked = True
            try:
                self._client.create_registered_model(name)
            except Exception as error:
                if getattr(error, "error_code", None) != "RESOURCE_ALREADY_EXISTS":
                    raise
            version = self._client.create_model_version(
                name, source=self._source(model), run_id=self._run.run_id, tags=shown, await_creation_for=0
            )
            return int(version.version)

        return self._patiently(make, f"models:/{name}: no version was made")

    def set_alias(self, name: str, alias: str, version: int) -> None:
        self._patiently(
            lambda: self._client.set_registered_model_alias(name, alias, str(version)),
            f"models:/{name}@{alias}: the alias was not moved to version {version}",
        )

    def find(self, name: str, digest: str) -> int | None:
        return self._patiently(lambda: RegistryReader.find(self, name, digest), f"models:/{name} cannot be read")

    def alias(self, name: str, alias: str) -> int | None:
        return self._patiently(lambda: RegistryReader.alias(self, name, alias), f"models:/{name} cannot be read")

    def resolve(self, model: str) -> tuple[str, str]:
        return self._patiently(lambda: RegistryReader.resolve(self, model), f"{model} cannot be read")

    def close(self) -> None:
        """Nothing is held for it."""

    def _source(self, model: Artifact) -> str:
        """What MLflow shows as the version's place. A server refuses any local path outside the run's own artifacts."""
        if not self.uri.startswith("http") or not model.uri.startswith("file:"):
            return model.uri
        if self._run.run_id is None:
            raise ResourcesUnavailable("the run is not recorded yet")
        return f"runs:/{self._run.run_id}/model"

    def _patiently(self, call: Callable[[], T], what: str) -> T:
        return patiently(call, PATIENCE_S, f"{redacted(self.uri)}: {what}")


def patiently(call: Callable[[], T], patience_s: float, what: str) -> T:
    """The call's answer, tried again while the store is locked or away. Raises ResourcesUnavailable after `patience_s`; what
    the store will never take is raised at once."""
    from sqlalchemy.exc import OperationalError

    deadline = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except ResourcesUnavailable:
            if time.monotonic() > deadline:
                raise
        except Exception as error:
            code = getattr(error, "error_code", None)  # MLflow's own
            if code is None and not isinstance(error, OperationalError | OSError):
                raise
            if code in NEVER_ACCEPTED or time.monotonic() > deadline:
                raise ResourcesUnavailable(f"{what} ({redacted(str(error).strip().partition(chr(10))[0])})") from error
        time.sleep(TRY_AGAIN_S)
