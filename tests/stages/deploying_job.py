"""A process that deploys and kills itself at a step of it: `python -m tests.stages.deploying_job JOB.json`. Apart, because a SIGKILL takes
the whole process, and because its registry must be there afterwards: it is a file.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.artifacts import Artifact, ModelVersion
from stages.contract import Context
from stages.deploy import DeployConfig, DeployResources, deploy

STEPS = (
    "loading the new version for a trial",
    "starting the new version",
    "waiting for the new version",
    "asking the golden questions",
    "recorded",
    "previous moved",
)


class FileRegistry:
    """Aliases in a file; what is asked of the rest is never asked by deploy."""

    def __init__(self, path: Path, die_at: str = "") -> None:
        self._path, self._die_at = path, die_at

    def alias(self, name: str, alias: str) -> int | None:
        if self._die_at == "recorded":
            die()
        return self.aliases().get(alias)

    def set_alias(self, name: str, alias: str, version: int) -> None:
        self._path.write_text(json.dumps({**self.aliases(), alias: version}))
        if self._die_at == "previous moved" and alias == "previous":
            die()

    def aliases(self) -> dict[str, int]:
        return json.loads(self._path.read_text()) if self._path.exists() else {}

    def find(self, name: str, digest: str) -> int | None:
        raise NotImplementedError

    def register(self, name: str, model: Artifact, tags: Mapping[str, str], metrics: Mapping[str, float]) -> int:
        raise NotImplementedError

    def resolve(self, model: str) -> tuple[str, str]:
        raise NotImplementedError


class Silent:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def context(state: Path, output: Path, die_at: str = "") -> Context:
    def progress(fraction: float, text: str) -> None:
        if text == die_at:
            die()

    output.mkdir(parents=True, exist_ok=True)
    return Context(
        output=output, work=output, state=state, fingerprint="0" * 64, seed=0, tracker=Silent(),
        registry=FileRegistry(state / "aliases.json", die_at), progress=progress, headline=lambda text: None,
    )  # fmt: skip


def config(port: int) -> DeployConfig:
    return DeployConfig(port=port, resources=DeployResources(rollout_timeout_s=120, max_latency_ratio=None))


def main(job: dict[str, Any]) -> None:
    import ray

    ray.init(address=job["address"], log_to_driver=False, logging_level="ERROR")
    state = Path(job["state"])
    deploy(config(job["port"]), context(state, Path(job["output"]), job["die_at"]), ModelVersion(uri=job["receipt"]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
