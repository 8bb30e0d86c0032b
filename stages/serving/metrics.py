"""What /metrics tells Prometheus. Apart from the app, which calls it at the moments that are counted. A registry for each app: two in
one process do not add up."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from stages.serving.engine import Engine
from stages.serving.rows import Delta, Done, Event

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters of one app."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "llm_requests", "Answers by route and HTTP status", ["route", "status"], registry=self._registry
        )
        self._rejected = Counter(
            "llm_rejected", "Refused requests by reason (the error's code)", ["reason"], registry=self._registry
        )
        self._first = Histogram(
            "llm_time_to_first_token_seconds", "From arrival", buckets=SECONDS, registry=self._registry
        )
        self._between = Histogram(
            "llm_inter_token_seconds", "Between texts of a choice", buckets=SECONDS, registry=self._registry
        )
        self._whole = Histogram(
            "llm_request_seconds", "From arrival to the last byte", buckets=SECONDS, registry=self._registry
        )
        self._registry.register(_OfEngine(engine))

    def answered(self, route: str, status: int, reason: str | None) -> None:
        """The status line of an answer is out. `reason` is the code of an error."""
        self._requests.labels(route, str(status)).inc()
        if status >= 400:
            self._rejected.labels(reason or "other").inc()

    def clock(self) -> "Clock":
        """Times one request from now on."""
        return Clock(self._first, self._between, self._whole)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


class _OfEngine(Collector):
    """The numbers that the engine keeps itself."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield GaugeMetricFamily("llm_running", "Answers that grow", stats.running)
        yield GaugeMetricFamily("llm_waiting", "Requests that have not begun", stats.waiting)
        yield CounterMetricFamily("llm_generation_tokens", "Tokens sampled", stats.generated_tokens)
        yield CounterMetricFamily("llm_prompt_tokens", "Tokens read from prompts", stats.prompt_tokens)
        yield CounterMetricFamily("llm_steps", "Turns in which every growing answer got a token", stats.steps)
        yield CounterMetricFamily("llm_cancelled", "Requests that nobody waited for any more", stats.cancelled)


class Clock:
    """The times of one request."""

    def __init__(self, first: Histogram, between: Histogram, whole: Histogram) -> None:
        self._first, self._between, self._whole = first, between, whole
        self._began = time.monotonic()
        self._last: dict[int, float] = {}

    def saw(self, event: Event) -> None:
        if not isinstance(event, Delta | Done):
            return
        now = time.monotonic()
        if not self._last:
            self._first.observe(now - self._began)
        elif event.choice in self._last and isinstance(event, Delta):
            self._between.observe(now - self._last[event.choice])
        self._last[event.choice] = now

    def ended(self) -> None:
        self._whole.observe(time.monotonic() - self._began)
