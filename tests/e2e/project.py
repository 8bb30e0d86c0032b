"""A project of one's own for a test: a state root that meets no other clone, and the command line that people type."""

import json
import os
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import mlflow

from pipelines.config import ROOT

SMALL = [
    "run.limit=400",
    "stages.train.max_steps=30",
    "stages.train.tokens_per_step=2048",
    "stages.tokenize.vocab_size=512",
    "stages.gate.rules.must_beat=[untrained]",
    "stages.deploy.port=18411",
]


WATCH = """
import sys

def note(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        with open({log!r}, "a") as log:
            log.write(str(arguments[1][0]) + "\\n")

sys.addaudithook(note)
"""


@dataclass
class Project:
    """A state root of its own: nothing it does meets another clone or what this machine serves."""

    state: Path

    @property
    def watched(self) -> dict[str, str]:
        """An environment in which every Python process notes where it connects to."""
        hook = self.notes / "hook"
        hook.mkdir(parents=True, exist_ok=True)
        (hook / "sitecustomize.py").write_text(WATCH.format(log=str(self.connections)))
        return {"PYTHONPATH": str(hook)}

    @property
    def connections(self) -> Path:
        return self.notes / "connections.log"

    @property
    def notes(self) -> Path:
        """A place beside the state root, also when that cannot be made."""
        return self.state.parent.parent / f"{self.state.parent.name}-notes"

    def cli(self, command: str, *overrides: str, check: int | None = 0, env: dict[str, str] | None = None) -> str:
        run = subprocess.run(
            [sys.executable, "-m", "pipelines", command, f"state={self.state}", *overrides],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=280,
            env={**os.environ, **self.watched, **(env or {})},
        )
        if check is not None:
            assert run.returncode == check, f"exit {run.returncode}\n{run.stdout}\n{run.stderr}"
        return run.stdout + run.stderr

    @property
    def client(self) -> mlflow.MlflowClient:
        return mlflow.MlflowClient(f"sqlite:///{self.state / 'mlflow' / 'mlflow.db'}")

    @property
    def endpoint(self) -> dict[str, str]:
        found: dict[str, str] = json.loads((self.state / "endpoint.json").read_text())
        return found

    def ready(self) -> dict[str, str]:
        with urllib.request.urlopen(f"{self.endpoint['base_url']}/ready", timeout=5) as answer:
            loaded: dict[str, str] = json.load(answer)
            return loaded

    def runs(self, experiment: str) -> list[mlflow.entities.Run]:
        found = self.client.get_experiment_by_name(experiment)
        return list(self.client.search_runs([found.experiment_id])) if found else []

    @property
    def v1(self) -> str:
        """Base URL for the OpenAI client."""
        return f"{self.endpoint['base_url']}/v1"

    @property
    def head(self) -> int:
        """Pid of the Ray head's keeper."""
        return int(json.loads((self.state / "cluster" / "head.json").read_text())["pid"])
