"""Metrics of a server, for Prometheus."""

import functools
import time
from collections.abc import Collection

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from models.serve.runner import Runner

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class Metrics:
    """Counters of one server and, on Linux, of its process; https://prometheus.io/docs/concepts/metric_types."""

    def __init__(self, runner: Runner):
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        for name, help_text, read_value in (
            ("serve_texts_open", "Texts that are being made or wait.", lambda: runner.num_open),
            ("serve_slots_used", "Slots of the engine that texts have.", lambda: runner.num_running),
            ("serve_blocks_used", "Blocks of the cache that texts have.", lambda: runner.num_used_blocks),
        ):
            Gauge(name, help_text, registry=registry).set_function(read_value)
        counter = functools.partial(Counter, registry=registry)
        histogram = functools.partial(Histogram, buckets=_SECONDS, registry=registry)
        self._requests = counter("serve_requests", "Requests that were answered.", ["route", "status"])
        self._texts = counter("serve_texts", "Texts that ended, by the reason.", ["reason"])
        self._prompt = counter("serve_prompt_tokens", "Tokens of prompts whose texts ended.")
        self._reused = counter("serve_reused_tokens", "Of those, the ones found in the cache.")
        self._made = counter("serve_generated_tokens", "Tokens generated in texts that ended.")
        self._first_token = histogram(
            "serve_first_token_seconds", "From a request to its text's first token."
        )
        self._next_token = histogram("serve_next_token_seconds", "From a token to the next of its text.")
        self._whole_text = histogram("serve_text_seconds", "From a request to the end of its text.")

    async def answer(self, request: Request) -> Response:
        """Answer a request with all metrics, in Prometheus' text format."""
        text = prometheus_client.generate_latest(self._registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    def count_request(self, route: str, status: int) -> None:
        self._requests.labels(route, status).inc()

    def _record_text(self, reason: str, seconds: float, prompt: int, reused: int, made: int) -> None:
        self._texts.labels(reason).inc()
        self._prompt.inc(prompt)
        self._reused.inc(reused)
        self._made.inc(made)
        self._whole_text.observe(seconds)


class TokenTimer:
    """A clock for the tokens of one text, which reports their times to the metrics."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._started = time.perf_counter()
        self._latest: float | None = None
        self._has_ended = False

    def record_tokens(self, number: int) -> None:
        """Record that ``number`` tokens came at once."""
        now = time.perf_counter()
        if self._latest is None and number:
            self._metrics._first_token.observe(now - self._started)
            self._latest, number = now, number - 1
        for _ in range(number):
            assert self._latest is not None
            self._metrics._next_token.observe((now - self._latest) / number)
        if number:
            self._latest = now

    def record_end(self, reason: str, *, prompt: int, reused: int, made: int) -> None:
        """Record that the text ended; only the first call counts."""
        if not self._has_ended:
            self._has_ended = True
            self._metrics._record_text(reason, time.perf_counter() - self._started, prompt, reused, made)


class CountingMiddleware:
    """An application whose answers are counted by route and status; unknown routes are counted together as "other"."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Collection[str]):
        self._app, self._metrics, self._routes = app, metrics, frozenset(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in self._routes else "other"
        has_begun = False

        async def counted(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self._metrics.count_request(route, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            # Starlette answers it outside of all middleware.
            if not has_begun:
                self._metrics.count_request(route, 500)
            raise
