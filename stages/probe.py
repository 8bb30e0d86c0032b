"""Probe: what a client of the live endpoint gets. Apart from deploy, because it only measures and changes nothing."""

import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

from stages.artifacts import Endpoint, ProbeReport
from stages.contract import Context, ResourcesUnavailable, StageConfig, StageError, stage
from stages.serving.endpoint import ask_ready, client_key


@dataclass(kw_only=True)
class ProbeConfig(StageConfig):
    """Options in `conf/probe/`."""

    prompt: str = "os.path.join("
    """Text that every request continues."""
    max_tokens: int = 32
    """Tokens of each answer; the end-of-sequence token is ignored, so that all have this length."""
    requests: int = 5
    """Measured requests, one after the other; one more before them is not measured."""
    timeout_s: float = 60.0
    """Seconds that one request may take."""

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 2), ("requests", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s must be above 0, got {self.timeout_s}")


@dataclass(frozen=True)
class Timing:
    """Seconds of one streamed answer, measured by its client."""

    first_token: float
    total: float
    tokens: int
    text: str

    @property
    def inter_token(self) -> float:
        return (self.total - self.first_token) / (self.tokens - 1)


@stage()
def probe(cfg: ProbeConfig, ctx: Context, endpoint: Endpoint) -> ProbeReport:
    """Check identity, equality of streamed and whole answers, and the shape of errors; then measure."""
    import openai

    facts = endpoint.summary()
    key = client_key(facts.get("api_key_env"))
    client = openai.OpenAI(base_url=f"{facts['base_url']}/v1", api_key=key, max_retries=1, timeout=cfg.timeout_s)
    try:
        _check_identity(facts, client)
        _check_error(facts, client)
        _check_equal(cfg, facts, client)
        _stream(cfg, facts["model"], client)
        timings = []
        for number in range(cfg.requests):
            timings.append(_stream(cfg, facts["model"], client))
            ctx.progress((number + 1) / cfg.requests, f"request {number + 1} of {cfg.requests}")
    except openai.APIConnectionError as error:
        raise ResourcesUnavailable(f"probe: the endpoint does not answer at {facts['base_url']}") from error
    except openai.APIError as error:
        raise StageError(f"probe: {facts['base_url']} refuses a legal request: {error.message}") from error
    metrics = _metrics(timings)
    ctx.tracker.log_metrics(metrics)
    ctx.headline(f"{metrics['tokens_per_second']:.0f} tokens/s, first after {metrics['ttft_p50_ms']:.0f} ms")
    checks = ["digest", "error_shape", "streamed_equals_whole"]
    identity = {name: facts[name] for name in ("base_url", "model", "version", "digest")}
    return ProbeReport(uri=ProbeReport.write(ctx.output, {"checks": checks, "metrics": metrics, **identity}).uri)


def _check_identity(facts: dict[str, Any], client: Any) -> None:
    """A server that is not ours has no /ready, and may serve other models beside."""
    if facts.get("external"):
        listed = [model.id for model in client.models.list().data]
        if facts["model"] not in listed:
            raise StageError(f"probe: /v1/models lists {listed}, and not {facts['model']!r}")
        return
    ready = ask_ready(facts["base_url"])
    if ready is None:
        raise ResourcesUnavailable(f"probe: {facts['base_url']}/ready does not answer; run make run to deploy again")
    for name in ("model", "version", "digest", "config_digest"):
        if ready.get(name) != facts[name]:
            raise StageError(f"probe: the endpoint's {name} is {ready.get(name)}, deployed was {facts[name]}")
    listed = [model.id for model in client.models.list().data]
    if listed != [facts["model"]]:
        raise StageError(f"probe: /v1/models lists {listed}, wanted [{facts['model']!r}]")


def _check_error(facts: dict[str, Any], client: Any) -> None:
    import openai

    try:
        client.completions.create(model=facts["model"], prompt="x", temperature=-1)
    except openai.BadRequestError as error:
        if facts.get("external") or (error.param == "temperature" and error.type == "invalid_request_error"):
            return  # whose words another server's refusal has is its own matter
        raise StageError(f"probe: a wrong temperature is refused as {error.type}, param {error.param}") from error
    raise StageError("probe: a request with temperature -1 was answered, wanted 400 that names the parameter")


def _check_equal(cfg: ProbeConfig, facts: dict[str, Any], client: Any) -> None:
    asked = _asked(cfg, facts["model"])
    whole = client.completions.create(**asked).choices[0].text
    streamed = _stream(cfg, facts["model"], client).text
    if streamed != whole:
        at = next((i for i, (a, b) in enumerate(zip(streamed, whole, strict=False)) if a != b), len(whole))
        raise StageError(f"probe: the streamed greedy answer differs from the whole one from character {at} on")


def _asked(cfg: ProbeConfig, model: str) -> dict[str, Any]:
    extension = {"ignore_eos": True}
    return {
        "model": model, "prompt": cfg.prompt, "max_tokens": cfg.max_tokens, "temperature": 0, "extra_body": extension
    }  # fmt: skip


def _stream(cfg: ProbeConfig, model: str, client: Any) -> Timing:
    pieces, first, tokens = [], math.nan, 0
    began = time.perf_counter()
    for chunk in client.completions.create(**_asked(cfg, model), stream=True, stream_options={"include_usage": True}):
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        elif chunk.choices[0].text:
            pieces.append(chunk.choices[0].text)
            first = time.perf_counter() - began if math.isnan(first) else first
    total = time.perf_counter() - began
    return Timing(total if math.isnan(first) else first, total, tokens, "".join(pieces))


def _metrics(timings: list[Timing]) -> dict[str, float]:
    """Medians over the requests. Milliseconds as a client sees them; a token may come with the next one's text."""
    return {
        "ttft_p50_ms": 1000 * statistics.median(timing.first_token for timing in timings),
        "inter_token_p50_ms": 1000 * statistics.median(timing.inter_token for timing in timings),
        "total_p50_ms": 1000 * statistics.median(timing.total for timing in timings),
        "tokens_per_second": statistics.median(timing.tokens / timing.total for timing in timings),
        "requests": float(len(timings)),
    }
