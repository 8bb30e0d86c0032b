"""What Ray Serve adds to the first token of an answer: the very same ASGI app and model under Serve's proxy and replica
and under plain uvicorn, both up at once, asked in turns by one client with one request at a time.

The uvicorn side is a process of its own: `python -m benchmarks.serve_overhead <checkpoint> <port>`.
"""

import http.client
import json
import statistics
import sys
import time
import urllib.request
from pathlib import Path

from benchmarks import machine
from benchmarks.harness import Bench, Check, Result, medians

NAME, DIGEST = "bench", "0" * 64
PROMPT = "def main(arguments):\n    "
TOKENS = 8
START_TIMEOUT_S = 60.0
ADDED_MS = 15.0


def run(bench: Bench) -> list[Result]:
    from pipelines import cluster
    from pipelines.config import ClusterConfig

    requests = 5 if bench.quick else 40
    with machine.scratch() as directory, machine.local_head(directory / "state"):
        checkpoint = small_model(directory)
        bench.say("head up, a small model made")
        plain_port = machine.free_port()
        command = machine.python("-m", "benchmarks.serve_overhead", str(checkpoint), str(plain_port))
        environ = machine.clean_environment(OMP_NUM_THREADS="1")
        with (
            machine.started(command, directory / "uvicorn.log", environ),
            cluster.connect(ClusterConfig(), directory / "state"),
        ):
            serve_port = _under_serve(checkpoint)
            wait_ready(plain_port)
            bench.say("both servers answer")
            texts: dict[int, set[str]] = {plain_port: set(), serve_port: set()}

            def block(port: int) -> float:
                """Median milliseconds to the first token over a block of requests."""
                times = []
                for _ in range(requests):
                    first_ms, text = _first_token(port)
                    times.append(first_ms)
                    texts[port].add(text)
                return statistics.median(times)

            block(plain_port), block(serve_port)
            pairs = bench.alternate(bench.pairs(10), lambda: block(plain_port), lambda: block(serve_port))
            floor = bench.alternate(bench.pairs(6), lambda: block(plain_port), lambda: block(plain_port), "A/A pair")
    answers = texts[plain_port] | texts[serve_port]
    same = Check("both servers give one and the same answer", len(answers) == 1, f"{len(answers)} answers")
    return [
        bench.value(
            "serve_first_token_added_ms",
            "How many milliseconds does Ray Serve add to the first token, one request at a time?",
            unit="ms",
            values=[pair.b - pair.a for pair in pairs],
            limit=ADDED_MS,
            gate=[same],
            details={"requests_a_block": requests, **medians(pairs)},
        ),
        bench.compare(
            "serve_first_token_ms",
            "What does Ray Serve add to the time to the first token, one request at a time?",
            unit="ms",
            better="lower",
            arms={"A": "uvicorn", "B": "Ray Serve"},
            pairs=pairs,
            floor_pairs=floor,
            margin=0.1,
            gate=[same],
            details={"requests_a_block": requests, "tokens": TOKENS},
        ),
    ]


def small_model(directory: Path) -> Path:
    """Made in a process of its own: torch's threads and settings stay out of this one."""
    script = f"from benchmarks.workload import *; make_checkpoint(Path({str(directory)!r}))"
    machine.run(machine.python("-c", script), directory / "model.log", machine.clean_environment(), 120)
    return directory / "work" / "export"


def _under_serve(checkpoint: Path) -> int:
    """Deploy as the deploy stage does, without its trial and aliases; the port."""
    from stages.serving import deployment
    from stages.serving.endpoint import Deployed
    from stages.serving.options import ServingOptions

    port = deployment.start_serve("127.0.0.1", machine.free_port())
    deployed = Deployed(
        application=NAME,
        base_url=f"http://127.0.0.1:{port}",
        model=NAME,
        version=1,
        digest=DIGEST,
        config_digest=ServingOptions().digest(),
        instance="0" * 32,
        uri=checkpoint.as_uri(),
        num_cpus=0.5,
        options=ServingOptions(),
    )
    deployment.begin(deployed, START_TIMEOUT_S)
    deployment.wait_serving(deployed, START_TIMEOUT_S, lambda fraction, text: None)
    return port


def wait_ready(port: int) -> None:
    """Until the server there answers."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _first_token(port: int) -> tuple[float, str]:
    """(milliseconds until the first event of a streamed answer is read, the whole text)."""
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    first_ms, text = 0.0, ""
    for line in response:
        if line.startswith(b"data: {"):
            first_ms = first_ms or (time.perf_counter() - began) * 1000
            text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    connection.close()
    assert response.status == 200, text
    return first_ms, text


def plain(checkpoint: Path, port: int) -> None:
    """The app under uvicorn, as the tests run it."""
    import uvicorn

    from stages.serving.app import build_app
    from stages.serving.options import ServingOptions

    app = build_app(checkpoint, name=NAME, version=1, digest=DIGEST, options=ServingOptions())
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    plain(Path(sys.argv[1]), int(sys.argv[2]))
