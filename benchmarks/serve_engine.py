"""Output tokens a second of our server against what else serves the same file on processors: `transformers serve` at its defaults and with
continuous batching, and FastAPI around `generate`. SmolLM2-135M-Instruct, greedy, two cores, plain uvicorn on our side.

Each arm of a round is a process of its own that answers the same chats at 1, 4, 8 and 16 requests at once; arms take turns from round to
round. Beside it our loop without HTTP (what the server costs at one request), how much eight streams make of one, and what a prompt of
512 tokens that arrives among four streams does to their tokens.
"""

import contextlib
import http.client
import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine, serving_arms
from benchmarks.harness import Bench, Check, Pair, Result, medians

ARMS = {
    "ours": "this server under uvicorn",
    "transformers": "transformers serve, its defaults",
    "continuous": "transformers serve --continuous-batching",
    "fastapi": "FastAPI around generate, one request at a time",
}
LEVELS = (1, 4, 8, 16)
AT = 8
"""Requests at once at which arms are compared."""
LIMITS = {
    "transformers": ("serve_engine_transformers", 1.5),
    "continuous": ("serve_engine_continuous", 1.0),
    "fastapi": ("serve_engine_fastapi", 1.5),
}
"""Arm -> (name of the result, what ours must reach of it)."""
TOKENS, QUICK_TOKENS = 48, 8
ALONE, EIGHT, STALL = 0.9, 3.0, 3.0
LONG, STREAMS = 512, 4
START_TIMEOUT_S = 180.0
NAME = serving_arms.NAME


@dataclass
class Server:
    """A running arm."""

    port: int
    model: str
    """What it calls the model."""
    texts: dict[str, str] = field(default_factory=dict)
    """Question -> its answer, the first time it was asked."""

    def answer(self, question: str, tokens: int) -> int:
        """Ask for a whole answer; tokens that it has. RuntimeError for another status than 200."""
        body = {
            "model": self.model, "messages": [{"role": "user", "content": question}], "max_tokens": tokens, "temperature": 0,
            "stream": False,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {data[:300]!r}")
        found = json.loads(data)
        self.texts.setdefault(question, found["choices"][0]["message"]["content"])
        return int(found["usage"]["completion_tokens"])

    def rate(self, at_once: int, requests: int, tokens: int) -> float:
        """Output tokens a second with so many requests under way."""
        began = time.perf_counter()
        with ThreadPoolExecutor(at_once) as pool:
            made = sum(pool.map(lambda n: self.answer(serving_arms.question(n), tokens), range(requests)))
        return made / (time.perf_counter() - began)


def run(bench: Bench) -> list[Result]:
    tokens = QUICK_TOKENS if bench.quick else TOKENS
    levels = (1, AT) if bench.quick else LEVELS
    found: dict[str, list[dict[int, float]]] = {arm: [] for arm in ARMS}
    bare: list[float] = []
    stalls: list[float] = []
    texts: dict[str, dict[str, str]] = {}
    with machine.scratch() as directory:
        model = serving_arms.model(directory)
        bench.say("the model is there")
        for number in range(bench.pairs(4, quick=1)):
            for arm in order(number):
                with serving(arm, model, directory) as server:
                    server.rate(2, 2, tokens)  # warm
                    found[arm].append({n: server.rate(n, max(2 * n, 3), tokens) for n in levels})
                    texts.setdefault(arm, {}).update(server.texts)
                    if arm == "ours":
                        stalls.append(stall(server, tokens))
            bare.append(alone(model, directory, tokens))
            rates = "; ".join(f"{arm} {' '.join(f'{v:.1f}' for v in found[arm][-1].values())}" for arm in ARMS)
            bench.say(f"round {number + 1}: tokens/s at {levels}: {rates}; bare {bare[-1]:.1f}, stall {stalls[-1]:.2f}")
    return _results(bench, found, bare, stalls, texts, tokens)


def order(number: int) -> list[str]:
    """Of a round: to and fro, so that drift favours no arm."""
    return list(ARMS) if number % 2 == 0 else list(ARMS)[::-1]


@contextlib.contextmanager
def serving(arm: str, model: Path, directory: Path) -> Iterator[Server]:
    """A server that answers."""
    port = machine.free_port()
    environ = machine.clean_environment(OMP_NUM_THREADS=str(serving_arms.THREADS))
    with machine.started(serving_arms.command(arm, model, port), directory / f"{arm}.log", environ) as process:
        server = Server(port, NAME if arm in ("ours", "fastapi") else str(model))
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                server.answer("hello", 1)
                break
            except (OSError, RuntimeError, http.client.HTTPException) as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{arm} does not answer: {error}\n{machine.tail(directory / f'{arm}.log')}"
                    ) from error
                time.sleep(0.5)
        server.texts.clear()
        yield server


def alone(model: Path, directory: Path, tokens: int) -> float:
    """Output tokens a second of our loop without a server, one question after the other."""
    log = directory / "bare.log"
    environ = machine.clean_environment(OMP_NUM_THREADS=str(serving_arms.THREADS))
    machine.run(machine.python("-m", "benchmarks.serving_arms", "bare", str(model), str(tokens)), log, environ, 300)
    return float(json.loads(log.read_text().splitlines()[-1])["tokens_per_second"])


def stall(server: Server, tokens: int) -> float:
    """The longest that a token of four streams waits while a prompt of 512 tokens is read, beyond the usual step, in steps."""
    gaps: list[tuple[float, float]] = []

    def stream(number: int) -> None:
        last = 0.0
        for now in _events(server, serving_arms.question(number), 4 * tokens + 40):
            if last:
                gaps.append((now, now - last))
            last = now

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    while len(gaps) < STREAMS * 12:
        time.sleep(0.01)
    before = time.perf_counter()
    list(_events(server, serving_arms.long_question(LONG), 1))
    after = time.perf_counter()
    for thread in threads:
        thread.join()
    usual = statistics.median(gap for at, gap in gaps if at < before)
    return (max(gap for at, gap in gaps if before <= at <= after + usual) - usual) / usual


def _events(server: Server, question: str, tokens: int) -> Iterator[float]:
    """When each event with text of a streamed answer came."""
    body = {
        "model": server.model, "messages": [{"role": "user", "content": question}], "max_tokens": tokens, "temperature": 0,
        "stream": True, "ignore_eos": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    for line in connection.getresponse():
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
            yield time.perf_counter()
    connection.close()


def _results(
    bench: Bench,
    found: dict[str, list[dict[int, float]]],
    bare: Sequence[float],
    stalls: Sequence[float],
    texts: dict[str, dict[str, str]],
    tokens: int,
) -> list[Result]:
    details: dict[str, Any] = {
        "tokens_per_second": {
            arm: {str(n): round(statistics.median(run[n] for run in runs), 1) for n in runs[0]}
            for arm, runs in found.items()
        },
        "tokens_an_answer": tokens,
        "threads": serving_arms.THREADS,
    }
    ours = found["ours"]
    results = [
        bench.compare(
            name,
            f"How many output tokens a second at {AT} requests at once: ours against {ARMS[arm]}?",
            unit="tokens/s",
            better="higher",
            arms={"A": ARMS[arm], "B": ARMS["ours"]},
            pairs=(pairs := _pairs([run[AT] for run in found[arm]], [run[AT] for run in ours])),
            margin=0.05,
            limit=limit,
            gate=[_same(texts, arm)],
            details={**details, **medians(pairs)},
        )
        for arm, (name, limit) in LIMITS.items()
    ]
    one, eight = [run[1] for run in ours], [run[AT] for run in ours]
    return [
        *results,
        _ours(
            bench,
            "serve_engine_alone",
            "One request at a time: the server against its loop alone?",
            "the loop without HTTP",
            bare,
            one,
            ALONE,
        ),
        _ours(
            bench,
            "serve_engine_eight",
            "Eight requests at once against one: how much more in all?",
            "one request at a time",
            one,
            eight,
            EIGHT,
        ),
        bench.value(
            "serve_engine_stall_steps",
            f"How much longer does a token of {STREAMS} streams wait when a prompt of {LONG} tokens arrives, in usual steps?",
            unit="steps",
            values=list(stalls),
            limit=STALL,
            details={"prefill_chunk": serving_arms.PREFILL_CHUNK},
        ),
    ]


def _ours(
    bench: Bench, name: str, question: str, against: str, a: Sequence[float], b: Sequence[float], limit: float
) -> Result:
    pairs = _pairs(a, b)
    return bench.compare(
        name, question, unit="tokens/s", better="higher", arms={"A": against, "B": ARMS["ours"]}, pairs=pairs, margin=0.05,
        limit=limit, details=medians(pairs),
    )  # fmt: skip


def _pairs(a: Sequence[float], b: Sequence[float]) -> list[Pair]:
    return [Pair("AB" if n % 2 == 0 else "BA", one, other) for n, (one, other) in enumerate(zip(a, b, strict=True))]


def _same(texts: dict[str, dict[str, str]], arm: str) -> Check:
    """Greedy answers are equal, but where two best tokens tie (float32 rounds differently in batches): nine of ten questions at least."""
    ours, theirs = texts["ours"], texts[arm]
    equal = sum(ours[question].strip() == theirs[question].strip() for question in ours)
    return Check("both give the same answers", equal >= 0.9 * len(ours), f"{equal} of {len(ours)} equal")
