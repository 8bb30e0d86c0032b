"""SIGKILL of whoever deploys, at each step: what serves answers all the while, and the same command again ends in the same state."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipelines.config import ROOT
from stages.artifacts import ModelVersion
from stages.deploy import deploy
from stages.serving.endpoint import ask_ready, read_record
from tests.stages import deploying_job as job
from tests.stages.tiny_model import save_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(900)]
NAME = "quickstart"


@dataclass
class House:
    root: Path
    port: int
    address: str

    @property
    def state(self) -> Path:
        return self.root / "state"

    def version(self, number: int) -> ModelVersion:
        """The receipt of a model of its own, seeded by the number."""
        place, receipt = self.root / f"v{number}", self.root / f"receipt-{number}"
        if not place.exists():
            save_tiny_model(place, seed=number)
            receipt.mkdir()
        facts = {"name": NAME, "version": number, "digest": f"{number:064x}", "uri": place.as_uri()}
        return ModelVersion(uri=ModelVersion.write(receipt, facts).uri)

    def here(self, number: int) -> None:
        """Deploy in this process, to the end."""
        deploy(job.config(self.port), job.context(self.state, self.root / "output"), self.version(number))

    def killed(self, number: int, step: str) -> None:
        """Deploy in another process, which kills itself at a step."""
        facts = {
            "address": self.address, "state": str(self.state), "output": str(self.root / "output"), "port": self.port,
            "receipt": self.version(number).uri, "die_at": step,
        }  # fmt: skip
        (self.root / "job.json").write_text(json.dumps(facts))
        command = [sys.executable, "-m", "tests.stages.deploying_job", str(self.root / "job.json")]
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=dict(os.environ))
        assert made.returncode == -signal.SIGKILL, made.stdout + made.stderr

    def aliases(self) -> dict[str, int]:
        return job.FileRegistry(self.state / "aliases.json").aliases()


@pytest.fixture(scope="module")
def house(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    import ray
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    root = tmp_path_factory.mktemp("killed")
    (root / "state").mkdir()
    yield House(root, port, ray.get_runtime_context().gcs_address)
    serve.shutdown()


class Watch:
    """Asks for an answer again and again; keeps each one's version, or what went wrong."""

    def __init__(self, base_url: str) -> None:
        self.seen: list[str] = []
        self._url, self._over = f"{base_url}/v1/completions", threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 4, "temperature": 0}).encode()
        while not self._over.is_set():
            request = urllib.request.Request(self._url, body, {"content-type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=30) as response:
                    self.seen.append(str(response.headers["x-model-version"]))
            except OSError as error:
                self.seen.append(str(error))
            time.sleep(0.02)


def test_a_deployment_that_is_killed_at_any_step_ends_as_if_it_had_not_been(house: House) -> None:
    from ray import serve

    house.here(1)
    record = read_record(house.state)
    assert record is not None
    for number, step in enumerate(job.STEPS, 2):
        with Watch(record.base_url) as watch:
            house.killed(number, step)
            house.here(number)
        assert set(watch.seen) <= {str(number - 1), str(number)}, (step, set(watch.seen))
        record = read_record(house.state)
        ready = ask_ready(record.base_url) if record else None
        assert record is not None and ready is not None, step
        assert (record.version, ready["version"], ready["instance"]) == (number, number, record.instance), step
        assert house.aliases() == {"champion": number, "previous": number - 1}, step
        status = serve.status().applications
        assert list(status) == ["raykeel"], step
        states = status["raykeel"].deployments["model"].replica_states
        assert states.get("RUNNING") == 1, (step, states)
