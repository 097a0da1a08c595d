"""Metrics in Prometheus' text format, for /metrics: counters of the engine, and counts and times of requests.

prometheus_client writes the format and stores the histograms.
"""

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deskside.engine.engine import Engine
from deskside.serve.request_guard import App, Message, Receive, Send

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Upper bounds of histogram buckets in seconds.
ANSWER_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TOKEN_BUCKETS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class Metrics:
    """The metrics of one server."""

    def __init__(self, engine: Engine):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self._requests = Counter(
            "deskside_requests", "responses by path and status", ["path", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "deskside_request_seconds",
            "seconds from a request's head to the end of its response",
            ["path"],
            buckets=ANSWER_BUCKETS,
            registry=self._registry,
        )
        self.first_token_seconds = Histogram(
            "deskside_first_token_seconds",
            "seconds from the submission of a request to the engine to its first token",
            buckets=ANSWER_BUCKETS,
            registry=self._registry,
        )
        self.token_seconds = Histogram(
            "deskside_token_seconds",
            "mean seconds per token of a request after its first, over all of its choices",
            buckets=TOKEN_BUCKETS,
            registry=self._registry,
        )

    def text(self) -> bytes:
        """Return the body of /metrics. Reading the engine's counters does not wait for its thread."""
        return generate_latest(self._registry)

    def measured(self, app: App, paths: frozenset[str]) -> App:
        """Return an ASGI application that counts the requests of `app`. paths: the others count as "other"."""

        async def measure(scope: Message, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            path = scope["path"] if scope["path"] in paths else "other"
            started, status = time.perf_counter(), "none"

            async def watch(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = str(message["status"])
                await send(message)

            try:
                await app(scope, receive, watch)
            finally:
                self._requests.labels(path, status).inc()
                self._seconds.labels(path).observe(time.perf_counter() - started)

        return measure


class TokenTimer:
    """Observes the times of one request's tokens."""

    def __init__(self, metrics: Metrics):
        self._metrics, self._started = metrics, time.perf_counter()
        self._first = 0.0
        self._tokens = 0

    def token(self) -> None:
        """Count a token that has arrived."""
        if not self._tokens:
            self._first = time.perf_counter()
            self._metrics.first_token_seconds.observe(self._first - self._started)
        self._tokens += 1

    def end(self) -> None:
        """Observe the time per token at the end of the request."""
        if self._tokens > 1:
            mean = (time.perf_counter() - self._first) / (self._tokens - 1)
            self._metrics.token_seconds.observe(mean)


class _EngineCollector(Collector):
    """Reads the counters of the engine whenever the metrics are written."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, counts = self._engine, self._engine.counts
        counters: dict[str, tuple[str, Any]] = {
            "prompt_tokens": ("tokens of prompts of admitted answers", counts.prompt_tokens),
            "cached_prompt_tokens": (
                "tokens of these prompts that were found in the prefix cache",
                counts.cached_tokens,
            ),
            "generated_tokens": ("tokens of answers", counts.generated_tokens),
            "evicted_pages": ("cached pages that gave way to new ones", engine.evicted_pages),
            "steps": ("steps of the engine", counts.steps),
        }
        gauges: dict[str, tuple[str, Any]] = {
            "running_answers": ("answers with a place in the batch", engine.num_running),
            "waiting_answers": ("answers that wait for a place or for memory", engine.num_waiting),
            "free_cache_tokens": ("tokens that the key-value cache has room for", engine.free_tokens),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"deskside_{name}", text, value)
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"deskside_{name}", text, value)
