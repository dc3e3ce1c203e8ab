"""Counters of the API, in Prometheus' text format, and its log: a line a request, and tokens a second."""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanodag.api.choice import SampledChoice
from nanodag.api.replies import usage
from nanodag.api.served_model import ServedModel
from nanodag.errors.words import counted
from nanodag.inference.access_checks import CLIENT_CLOSED_REQUEST

log = logging.getLogger(__name__)  # at INFO

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
SAMPLES = "nanodag.samples"  # in a request's scope: its samples
SPEED_EVERY_S = 10.0
LONGEST_PATH = 200


class Metrics:
    """Metrics of one application. num_in_flight: samples under way, those that wait in an engine included. num_sampled:
    tokens so far, of answers under way, too."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        registry = self._registry = CollectorRegistry()
        by_model = ["model"]
        self.num_in_flight = self._num_ended_tokens = 0
        self._open: dict[int, Sequence[SampledChoice]] = {}
        self.replies = Counter("nanodag_replies", "Replies by status", ["path", "status"], registry=registry)
        self._in_flight = Gauge("nanodag_samples_in_flight", "Samples that run or wait", registry=registry)
        self._prompt = Counter("nanodag_prompt_tokens", "Tokens of prompts", by_model, registry=registry)
        self._sampled = Counter("nanodag_sampled_tokens", "Tokens sampled", by_model, registry=registry)
        self._ended = Counter("nanodag_samples", "Samples by why they ended", ["model", "reason"], registry=registry)
        seconds = partial(Histogram, labelnames=by_model, buckets=SECONDS, registry=registry)
        self.first_token = seconds("nanodag_first_token_seconds", "Until a stream's first token")
        self._took = seconds("nanodag_request_seconds", "Until a request's last token")
        restarts = Gauge("nanodag_engine_restarts", "Engines that were started again", by_model, registry=registry)
        ready = Gauge("nanodag_engine_ready", "1 where an engine answers", by_model, registry=registry)
        self._in_flight.set_function(lambda: self.num_in_flight)
        for name, model in models.items():
            restarts.labels(name).set_function(partial(getattr, model.backend, "num_restarts"))
            ready.labels(name).set_function(partial(getattr, model.backend, "is_ready"))

    @property
    def num_sampled(self) -> int:
        return self._num_ended_tokens + sum(choice.answer.num_tokens for many in self._open.values() for choice in many)

    @contextmanager
    def counted(self, model: str, samples: Sequence[SampledChoice]) -> Iterator[None]:
        """Count samples as under way, and at the end what became of them."""
        self.num_in_flight += len(samples)
        self._open[id(samples)] = samples
        began = time.monotonic()
        try:
            yield
        finally:
            self.num_in_flight -= len(samples)
            del self._open[id(samples)]
            self._num_ended_tokens += sum(sample.answer.num_tokens for sample in samples)
            self._took.labels(model).observe(time.monotonic() - began)
            for sample in samples:
                self._prompt.labels(model).inc(len(sample.request.input_ids))
                self._sampled.labels(model).inc(sample.answer.num_tokens)
                self._ended.labels(model, sample.answer.finish_reason or "broken off").inc()

    async def exposition(self, http: HttpRequest) -> Response:
        """GET /metrics."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


class AccessLog:
    """Counts replies by path and status, and logs each request when its reply has ended: `POST /v1/completions 200
    0.532 s 12 + 34 tokens`, of its prompt and answers. A path that nothing serves is one of many, so it has no name in
    the count; in the log, as it is another's text, what is not plain ASCII is spelled out."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.monotonic(), CLIENT_CLOSED_REQUEST

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                route = None if status == HTTPStatus.NOT_FOUND else scope.get("route")
                self._metrics.replies.labels(getattr(route, "path", "other"), str(status)).inc()
            await send(message)

        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            await self._app(scope, receive, noted)
        finally:
            path, seconds = ascii(scope["path"][:LONGEST_PATH])[1:-1], time.monotonic() - began
            used = usage(scope[SAMPLES]) if SAMPLES in scope else {}
            tokens = f" {used['prompt_tokens']} + {used['completion_tokens']} tokens" if used else ""
            log.info("%s %s %d %.3f s%s", scope["method"], path, status, seconds, tokens)


async def log_speed(metrics: Metrics, every_s: float = SPEED_EVERY_S) -> None:
    """Log tokens a second while answers are written, for ever. An answer that is no stream counts at its end: the time
    that it took is then counted, too."""
    num_logged, since = metrics.num_sampled, time.monotonic()
    while True:
        await asyncio.sleep(every_s)
        now, num_new = time.monotonic(), metrics.num_sampled - num_logged
        if num_new:
            log.info(
                "%.1f tokens a second, %s under way", num_new / (now - since), counted(metrics.num_in_flight, "answer")
            )
        if num_new or not metrics.num_in_flight:
            num_logged, since = num_logged + num_new, now
