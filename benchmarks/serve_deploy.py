"""From the start of `deploy` to the first good answer, with Ray up: trial, golden questions, Serve, replica, public address. The
quickstart's model; each round ends with Serve shut down, so that each begins where a first deployment does.
"""

import json
import time
import urllib.request
from pathlib import Path

from benchmarks import bare, machine
from benchmarks.harness import Bench, Check, Result
from benchmarks.serve_overhead import DIGEST, NAME, small_model
from stages.artifacts import ModelVersion

LIMIT_S = 20.0


def run(bench: Bench) -> list[Result]:
    from pipelines import cluster
    from pipelines.config import ClusterConfig

    seconds, texts = [], set()
    with machine.scratch() as directory, machine.local_head(directory / "state"):
        model = small_model(directory)
        bench.say("head up, a small model made")
        with cluster.connect(ClusterConfig(), directory / "state"):
            from ray import serve

            for number in range(bench.pairs(5, quick=1)):
                place = directory / f"round-{number}"
                took, text = _deploy(model, place)
                seconds.append(took)
                texts.add(text)
                bench.say(f"round {number + 1}: {took:.1f} s")
                serve.shutdown()
    return [
        bench.value(
            "serve_deploy_seconds",
            "How long from the start of deploy to the first good answer, with Ray up?",
            unit="s",
            values=seconds,
            limit=LIMIT_S,
            gate=[
                Check(
                    "every round gives one and the same answer",
                    len(texts) == 1 and "" not in texts,
                    f"{len(texts)} answers",
                )
            ],
        )
    ]


def _deploy(model: Path, place: Path) -> tuple[float, str]:
    """(seconds, text of the first answer)."""
    from stages.deploy import DeployConfig, deploy

    for name in ("version", "output", "work"):
        (place / name).mkdir(parents=True)
    facts = {"name": NAME, "version": 1, "digest": DIGEST, "uri": model.as_uri()}
    version = ModelVersion.write(place / "version", facts)
    began = time.perf_counter()
    endpoint = deploy(DeployConfig(port=machine.free_port()), bare.context(place / "output", place / "work"), version)
    body = {"model": NAME, "prompt": "import os", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{endpoint.summary()['base_url']}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        text = json.load(response)["choices"][0]["text"]
    return time.perf_counter() - began, text
