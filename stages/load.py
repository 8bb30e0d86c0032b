"""Load: what many clients at once get of the live endpoint. Apart from probe, which asks one question after the other and checks the
answers: this sends requests as a crowd does, and says how long the crowd waits.

Closed loop (`concurrency`): so many clients, each asks again when it was answered. Open loop (`rate`): requests come when they come,
whether or not earlier ones are answered, as people do; only this shows a queue that grows. The program that sends them is guidellm.
"""

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from stages.artifacts import Checkpoint, Corpus, Endpoint, LoadReport, ModelVersion
from stages.contract import Context, ResourcesUnavailable, StageConfig, StageError, StageResources, stage
from stages.serving import guidellm
from stages.serving.endpoint import client_key

PERCENTILES = (50, 95, 99)
PATIENCE_S = 120.0
"""Seconds that one request may take before its client gives up."""


class Arrival(Enum):
    """How the requests of an open loop are spaced."""

    poisson = "poisson"
    constant = "constant"


@dataclass(kw_only=True)
class Objective:
    """What a request must keep to count as well served. Null: not asked."""

    ttft_ms: float | None = 1000.0
    """Milliseconds until the first token."""
    itl_ms: float | None = 200.0
    """Milliseconds from token to token, the request's mean."""

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "itl_ms"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"objective.{name} must be null or above 0, got {value}")
        if self.ttft_ms is None and self.itl_ms is None:
            raise ValueError("objective must hold ttft_ms or itl_ms: without either every answer is a good one")

    def kept_by(self, request: guidellm.Request) -> bool:
        """An answer of one token has no time between tokens, and keeps that part."""
        first = self.ttft_ms is None or (request.ttft_ms is not None and request.ttft_ms <= self.ttft_ms)
        between = self.itl_ms is None or request.itl_ms is None or request.itl_ms <= self.itl_ms
        return request.ok and first and between


@dataclass(kw_only=True)
class LoadResources(StageResources):
    """How it is executed."""

    program: str = ".raykeel/tools/guidellm/bin/guidellm"
    """The load generator: a path, from where the command is typed, or a name on PATH. `make load-tool` installs it there."""


@dataclass(kw_only=True)
class LoadConfig(StageConfig):
    """Options in `conf/load/`."""

    concurrency: int | None = None
    """Closed loop: clients at once. Give this or `rate`."""
    rate: float | None = None
    """Open loop: requests a second. Give this or `concurrency`."""
    arrival: Arrival = Arrival.poisson
    """Open loop: `poisson` as independent people come, `constant` evenly."""
    requests: int = 64
    """Requests that are measured."""
    warmup_requests: int = 8
    """Requests before them that are not."""
    prompt_tokens: int = 64
    """Mean length of a prompt; with a connected `corpus`, where its texts are cut."""
    prompt_tokens_stdev: int = 16
    """Standard deviation of made-up prompts' lengths; 0: all alike."""
    output_tokens: int = 32
    """Length of each answer; the end-of-sequence token is ignored."""
    chat: bool = False
    """Ask /v1/chat/completions instead of /v1/completions."""
    objective: Objective = field(default_factory=Objective)
    """What goodput counts."""
    resources: LoadResources = field(default_factory=LoadResources)
    """How it is executed."""

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError(f"give one of concurrency and rate, got concurrency {self.concurrency}, rate {self.rate}")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be above 0, got {self.rate}")
        least = {
            "concurrency": 1,
            "requests": 1,
            "warmup_requests": 0,
            "prompt_tokens": 1,
            "prompt_tokens_stdev": 0,
            "output_tokens": 2,
        }
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"{name} must be at least {bound}, got {value}")


@stage()
def load(
    cfg: LoadConfig, ctx: Context, endpoint: Endpoint, model: ModelVersion, corpus: Corpus | None = None
) -> LoadReport:
    """Warm up, send the crowd, say what it got. ResourcesUnavailable when the endpoint or the load generator is not there."""
    facts, served = endpoint.summary(), model.summary()
    if facts["digest"] != served["digest"]:
        raise StageError(f"load: the endpoint serves {facts['model']}, connect the same model to deploy and load")
    program = guidellm.find(cfg.resources.program)
    key = client_key(facts.get("api_key_env"))
    ctx.progress(0.02, "warming up")
    _warm_up(cfg, facts, key)
    directory = Checkpoint(uri=served["uri"]).local()
    prompts = _prompts(cfg, ctx, corpus, directory)
    requests = guidellm.run(
        program,
        spec(cfg, facts, prompts, str(directory), ctx.seed),
        ctx.work / "load",
        key,
        lambda passed_s: ctx.progress(min(0.05 + passed_s / 300, 0.95), f"{cfg.requests} requests under way"),
    )
    metrics = measure(requests, cfg.objective)
    ctx.tracker.log_metrics(metrics)
    ctx.headline(
        f"{metrics['output_tokens_per_second']:.0f} tokens/s, first after {metrics['ttft_p95_ms']:.0f} ms (p95), "
        f"{metrics['goodput']:.0%} well served"
    )
    identity = {name: facts[name] for name in ("base_url", "model", "version", "digest")}
    how = {name: getattr(cfg, name) for name in ("concurrency", "rate", "requests", "prompt_tokens", "output_tokens")}
    summary = {
        "metrics": metrics,
        "load": how,
        "curves": curves(requests),
        "objective": vars(cfg.objective),
        **identity,
    }
    return LoadReport(uri=LoadReport.write(ctx.output, summary).uri)


def _warm_up(cfg: LoadConfig, facts: dict[str, Any], key: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{facts['base_url']}/v1", api_key=key, max_retries=4, timeout=PATIENCE_S)

    def ask(number: int) -> None:
        client.completions.create(model=facts["model"], prompt=f"{number}", max_tokens=8, temperature=0)

    try:
        client.models.list()
        with ThreadPoolExecutor(min(cfg.concurrency or 4, 16)) as pool:
            list(pool.map(ask, range(cfg.warmup_requests)))
    except openai.APIConnectionError as error:
        raise ResourcesUnavailable(f"load: the endpoint does not answer at {facts['base_url']}") from error
    except openai.APIError as error:
        raise StageError(f"load: {facts['base_url']} refuses a legal request: {error.message}") from error


def spec(cfg: LoadConfig, facts: dict[str, Any], prompts: Path | None, tokenizer: str, seed: int) -> dict[str, Any]:
    """What to send, in the tool's own words."""
    profile: dict[str, Any] = {"kind": "concurrent", "streams": [cfg.concurrency]}
    if cfg.rate is not None:
        profile = {"kind": cfg.arrival.value, "rate": [cfg.rate]}
    made_up: dict[str, Any] = {
        "kind": "synthetic_text",
        "prompt_tokens": cfg.prompt_tokens,
        "output_tokens": cfg.output_tokens,
    }
    if cfg.prompt_tokens_stdev:
        # Bounded, so that no prompt is empty and none outgrows a context that its mean fits twice.
        bounds = {"prompt_tokens_min": 1, "prompt_tokens_max": 2 * cfg.prompt_tokens}
        made_up |= {"prompt_tokens_stdev": cfg.prompt_tokens_stdev, **bounds}
    return {
        "backend": {
            "kind": "openai_http",
            "target": facts["base_url"],
            "model": facts["model"],
            "request_format": "/v1/chat/completions" if cfg.chat else "/v1/completions",
            "http2": False,
            "timeout": PATIENCE_S,
            "extras": {"body": {"temperature": 0}},
        },
        "profile": profile,
        "constraints": [{"kind": "max_requests", "count": cfg.requests}],
        "tokenizer": {"kind": "hf_auto", "model": tokenizer},
        "data": [made_up if prompts is None else {"kind": "json_file", "path": str(prompts)}],
        "seed": {"kind": "static", "value": seed},
        "metrics": {"kind": "generative", "sample_size": 0},
    }


def _prompts(cfg: LoadConfig, ctx: Context, corpus: Corpus | None, directory: Path) -> Path | None:
    """A file of as many prompts as there are requests, from the corpus' validation texts; None: made-up ones are wanted."""
    if corpus is None:
        return None
    import pyarrow.compute
    import pyarrow.dataset
    import tokenizers

    encoder = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    rows = pyarrow.dataset.dataset(sorted((corpus.local() / "rows").glob("part-*.parquet")))
    wanted = pyarrow.compute.field("split") == "validation"
    texts = [text for text in rows.to_table(columns=["text"], filter=wanted)["text"].to_pylist() if text.strip()]
    if not texts:
        raise StageError(
            "load: the connected corpus has no validation text to make prompts of; leave corpus unconnected"
        )
    path = ctx.work / "prompts.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    cut = [
        encoder.decode(encoder.encode(text, add_special_tokens=False).ids[: cfg.prompt_tokens])
        for text in texts[: cfg.requests]
    ]
    rows_of = [{"prompt": text, "output_tokens_count": cfg.output_tokens} for text in cut]
    path.write_text(json.dumps([rows_of[number % len(rows_of)] for number in range(cfg.requests)]), "utf-8")
    return path


def measure(requests: Sequence[guidellm.Request], objective: Objective) -> dict[str, float]:
    """Times are those of answered requests, in milliseconds; shares are of all. No answer at all is an error: there is nothing to tell."""
    answered = [request for request in requests if request.ok]
    if not answered:
        raise StageError(f"load: none of {len(requests)} requests was answered; ask the endpoint by hand: make ask")
    well_served = sum(objective.kept_by(request) for request in requests)
    began = min(request.began for request in answered if request.began is not None)
    span_s = max(request.ended for request in answered if request.ended is not None) - began
    metrics = {
        "requests": float(len(requests)),
        "errors": float(len(requests) - len(answered)),
        "error_rate": 1 - len(answered) / len(requests),
        "goodput": well_served / len(requests),
        "goodput_per_second": well_served / span_s,
        "requests_per_second": len(answered) / span_s,
        "output_tokens_per_second": sum(request.tokens for request in answered) / span_s,
    }
    for name in ("ttft", "itl", "latency"):
        values = _values(answered, name)
        metrics |= {f"{name}_p{percent}_ms": percentile(values, percent) for percent in PERCENTILES if values}
    return metrics


def curves(requests: Sequence[guidellm.Request]) -> dict[str, list[float]]:
    """Name -> the 0th to the 100th percentile, in milliseconds: what a picture is drawn from."""
    answered = [request for request in requests if request.ok]
    found = {f"{name}_ms": _values(answered, name) for name in ("ttft", "itl", "latency")}
    return {name: [percentile(values, percent) for percent in range(101)] for name, values in found.items() if values}


def _values(answered: Sequence[guidellm.Request], name: str) -> list[float]:
    return [value for request in answered if (value := getattr(request, f"{name}_ms")) is not None]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of all do not exceed (nearest rank): one that was measured, never one between two."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
