"""Ten thousand requests to one server: prompts of 16 to 512 tokens, answers of 1 to 128, one in twenty left in the middle, one in fifty
malformed. Every status must be the right one, every answer as long as asked, and memory flat. The quickstart's model, plain uvicorn.

The server's memory (PSS) is read at each twentieth of the way: the first fifth is warm-up, the rest may grow by 5 % at most.
"""

import http.client
import json
import random
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine, serving_arms
from benchmarks.harness import Bench, Check, Result
from benchmarks.serve_overhead import small_model, wait_ready

REQUESTS, QUICK_REQUESTS = 10_000, 100
AT_ONCE = 16
CONTEXT = 1024
CANCELLED, MALFORMED = 0.05, 0.02
PROMPTS, ANSWERS = (16, 512), (1, 128)
GROWTH = 1.05
FIRST_TOKEN_ID, TOKEN_IDS = 10, 1000
"""Prompts are ids of this range: any text that the vocabulary of 2,048 holds."""
BAD: tuple[tuple[str | None, dict[str, Any], int], ...] = (
    ("{", {}, 400),
    ("[1, 2]", {}, 400),
    (None, {"temperature": -1}, 400),
    (None, {"max_tokens": 0.5}, 400),
    (None, {"stop": ["a"] * 5}, 400),
    (None, {"model": "nobody"}, 404),
    (None, {"prompt": [20] * (CONTEXT + 1)}, 400),
    (None, {"prompt": [10**9]}, 400),
)
"""(the body as it is, or None and what is wrong in a good one, the right status)."""


@dataclass
class Tally:
    """What came of the requests. Shared by the clients' threads."""

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def run(bench: Bench) -> list[Result]:
    requests = QUICK_REQUESTS if bench.quick else REQUESTS
    tally = Tally()
    with machine.scratch() as directory:
        model = small_model(directory)
        _widen(model)
        port = machine.free_port()
        environ = machine.clean_environment(OMP_NUM_THREADS=str(serving_arms.THREADS))
        command = serving_arms.command("ours", model, port)
        with machine.started(command, directory / "server.log", environ) as process:
            wait_ready(port)
            bench.say(f"the server answers; {requests} requests, {AT_ONCE} at once")
            began = time.perf_counter()

            def one(number: int) -> None:
                kind, wrong = ask(port, random.Random(number))
                with tally.lock:
                    tally.kinds[kind] += 1
                    tally.done += 1
                    if wrong:
                        tally.wrong.append(f"request {number} ({kind}): {wrong}")
                    if tally.done % max(requests // 20, 1) == 0:
                        tally.memory_mb.append(machine.pss_kb(process.pid) / 1000)
                        bench.say(f"{tally.done} done, {len(tally.wrong)} wrong, {tally.memory_mb[-1]:.0f} MB")

            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(one, range(requests)))
            seconds = time.perf_counter() - began
            code, wrong = _whole(port, {"prompt": [20] * 16, "max_tokens": 8})
            alive = Check("a good answer comes afterwards", code == 200 and not wrong, f"status {code} {wrong}")
    return _results(bench, tally, requests, seconds, alive)


def _results(bench: Bench, tally: Tally, requests: int, seconds: float, alive: Check) -> list[Result]:
    details = {"requests": requests, "kinds": dict(tally.kinds), "seconds": round(seconds, 1), "at_once": AT_ONCE}
    warm = tally.memory_mb[len(tally.memory_mb) // 5 :]
    growth = statistics.median(warm[-4:]) / statistics.median(warm[:4])
    return [
        bench.value(
            "serve_soak_wrong",
            f"Of {requests} requests, some of them left or malformed, how many were answered wrongly?",
            unit="requests",
            values=[len(tally.wrong)],
            limit=0,
            needs_quiet=False,
            gate=[alive],
            details={**details, "first_wrong": tally.wrong[:5]},
        ),
        bench.value(
            "serve_soak_memory_ratio",
            "How much memory does the server hold at the end against what it held when it was warm?",
            unit="times",
            values=[growth],
            limit=GROWTH,
            needs_quiet=False,
            details={**details, "memory_mb": [round(value, 1) for value in tally.memory_mb]},
        ),
    ]


def ask(port: int, pick: random.Random) -> tuple[str, str]:
    """One request of the mixture: (its kind, what was wrong with what came; empty: nothing)."""
    body: dict[str, Any] = {
        "prompt": [pick.randrange(FIRST_TOKEN_ID, TOKEN_IDS) for _ in range(pick.randint(*PROMPTS))],
        "max_tokens": pick.randint(*ANSWERS),
    }
    kind = pick.random()
    if kind < CANCELLED:
        return "cancelled", _leave(port, body)
    if kind < CANCELLED + MALFORMED:
        raw, wrong, right = pick.choice(BAD)
        status, found = _post(port, raw or json.dumps({**_good(body), **wrong}))
        fine = status == right and b'"error"' in found
        return "malformed", "" if fine else f"status {status}, wanted {right}: {found[:120]!r}"
    if kind < 0.5:
        status, fault = _whole(port, body)
        return "whole", fault if status == 200 else f"status {status}: {fault}"
    return "streamed", _streamed(port, body)


def _good(body: dict[str, Any]) -> dict[str, Any]:
    return {"model": serving_arms.NAME, "temperature": 1.0, "seed": 1, "ignore_eos": True, **body}


def _post(port: int, body: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, data


def _whole(port: int, body: dict[str, Any]) -> tuple[int, str]:
    """(status, what is wrong)."""
    status, data = _post(port, json.dumps(_good(body)))
    if status != 200:
        return status, data[:120].decode(errors="replace")
    usage = json.loads(data)["usage"]
    right = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    found = {name: usage[name] for name in right}
    return status, "" if found == right else f"{found}, wanted {right}"


def _streamed(port: int, body: dict[str, Any]) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    told = {**_good(body), "stream": True, "stream_options": {"include_usage": True}}
    connection.request("POST", "/v1/completions", json.dumps(told), {"content-type": "application/json"})
    response = connection.getresponse()
    events = [line[6:].strip() for line in response if line.startswith(b"data: ")]
    connection.close()
    if response.status != 200 or not events or events[-1] != b"[DONE]":
        return f"status {response.status}, last event {events[-1:]!r}"
    tokens = json.loads(events[-2])["usage"]["completion_tokens"]
    return "" if tokens == body["max_tokens"] else f"{tokens} tokens, wanted {body['max_tokens']}"


def _leave(port: int, body: dict[str, Any]) -> str:
    """Read one event of a long answer and hang up."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    told = {**_good(body), "stream": True, "max_tokens": ANSWERS[1]}
    connection.request("POST", "/v1/completions", json.dumps(told), {"content-type": "application/json"})
    response = connection.getresponse()
    line = response.readline()
    connection.close()
    return "" if response.status == 200 and line.startswith(b"data: ") else f"status {response.status}, {line!r}"


def _widen(model: Path) -> None:
    """A context that holds the longest prompt and answer: rotary positions have no table to grow."""
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": CONTEXT}), "utf-8")
