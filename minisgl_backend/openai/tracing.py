"""Spans of requests for an OpenTelemetry collector: for the endpoint's work and for the server's.

Exported over OTLP/HTTP by a thread of the SDK, from a queue of at most MAX_QUEUED spans; those that do not fit, or find
no collector, are dropped. Attributes follow OpenTelemetry's conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CHAT = "chat"  # the operation of paths for which no other one is told
MAX_QUEUED = 2048
MAX_BATCH = 512
EXPORT_EVERY_MS = 2000
EXPORT_SECONDS = 5.0  # per batch
CLOSE_SECONDS = 2.0  # for the remaining spans when the endpoint stops
# The parts of a request's time in the server: name, first and last metric.
_PHASES = (
    ("queue", "arrival_time_ns", "first_scheduled_time_ns"),
    ("prefill", "first_scheduled_time_ns", "first_token_time_ns"),
    ("decode", "first_token_time_ns", "last_token_time_ns"),
)


class Served(Protocol):
    """What the server tells of a generation that has ended."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None  # None: unknown
    perf_metrics: dict[str, int]  # nanoseconds, by name


class Tracing:
    """The SDK's tracer and its exporter."""

    def __init__(self, url: str, exporter: Any = None) -> None:
        """`url`: the collector's, like http://127.0.0.1:4318; `/v1/traces` is appended. `exporter`: another one."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # an absent collector would be logged each time
        if exporter is None:
            exporter = OTLPSpanExporter(endpoint=_traces_url(url), timeout=EXPORT_SECONDS)
        processor = BatchSpanProcessor(
            exporter,
            max_queue_size=MAX_QUEUED,
            max_export_batch_size=MAX_BATCH,
            schedule_delay_millis=EXPORT_EVERY_MS,
        )
        resource = Resource.create({"service.name": "minisgl-backend"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("minisgl_backend.openai")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, path: str, headers: Headers, operation: str = CHAT) -> RequestTrace:
        """Begins the span of a request, in the trace named by its headers, if any. `operation`: by OpenTelemetry's
        names."""
        from opentelemetry.trace import SpanKind

        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        parent = self._propagator.extract(carrier)
        attributes = {"http.request.method": "POST", "url.path": path, "gen_ai.operation.name": operation}
        span = self._tracer.start_span(f"POST {path}", parent, SpanKind.SERVER, attributes)
        return RequestTrace(self._tracer, span, self._propagator)

    def close(self) -> None:
        """Waits briefly for the remaining spans; an absent collector delays no one."""
        closer = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        closer.start()
        closer.join(CLOSE_SECONDS)


class RequestTrace:
    """The spans of one request."""

    def __init__(self, tracer: Any, span: Any, propagator: Any) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span)
        carrier: dict[str, str] = {}
        propagator.inject(carrier, self._context)
        self.headers: tuple[tuple[str, str], ...] = tuple(carrier.items())  # for calls on the request's behalf
        self._images_sent = 0

    @property
    def is_recorded(self) -> bool:
        """False if the trace is not sampled."""
        return bool(self._span.is_recording())

    def note_model(self, request_id: str, model: str | None) -> None:
        self._span.set_attribute("gen_ai.request.id", request_id)
        if model is not None:
            self._span.set_attribute("gen_ai.request.model", model)

    def note_images(self, began_ns: int, sent_ns: int) -> None:
        """The request's images were read, or fetched, here, and go on to the server, which decodes them."""
        self._tracer.start_span("images fetch", self._context, start_time=began_ns).end(sent_ns)
        self._images_sent = sent_ns

    def note_answer(self, generations: Sequence[Served]) -> None:
        """Records what the server did, once it is finished."""
        self._span.set_attribute("gen_ai.usage.output_tokens", sum(one.num_output_tokens for one in generations))
        cached = [one.num_cached_tokens for one in generations if one.num_cached_tokens is not None]
        self.note_input(sum(one.num_prompt_tokens for one in generations), sum(cached) if cached else None)
        arrivals = [time for one in generations if (time := one.perf_metrics.get("arrival_time_ns"))]
        if self._images_sent and arrivals:
            span = self._tracer.start_span("images decode", self._context, start_time=self._images_sent)
            span.end(max(self._images_sent, min(arrivals)))
        for generation in generations:
            figures = generation.perf_metrics
            for name, begin, end in _PHASES:
                if figures.get(begin) and figures.get(end):
                    self._tracer.start_span(name, self._context, start_time=figures[begin]).end(figures[end])

    def note_input(self, num_tokens: int, num_cached: int | None) -> None:
        """Number of prompt tokens, and how many of them the prefix cache supplied, if known."""
        self._span.set_attribute("gen_ai.usage.input_tokens", num_tokens)
        if num_cached is not None:
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", num_cached)

    def end(self, status: int) -> None:
        """`status`: of the HTTP response; 0: none was sent."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("http.response.status_code", status)
        if not status or status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class TraceRequests:
    """Traces requests that use the model, from their first byte to the last byte of the response."""

    def __init__(self, app: ASGIApp, tracing: Tracing, operations: Mapping[str, str] = {}) -> None:
        """`operations`: gen_ai.operation.name by path; all others below /v1/ are chats."""
        self._app = app
        self._tracing = tracing
        self._operations = operations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        operation = self._operations.get(path, CHAT if path.startswith("/v1/") else None)
        if scope["type"] != "http" or scope["method"] != "POST" or operation is None:
            await self._app(scope, receive, send)
            return
        trace = self._tracing.begin(path, Headers(scope=scope), operation)
        scope.setdefault("state", {})["trace"] = trace
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            trace.end(status)


def _traces_url(url: str) -> str:
    return url if url.rstrip("/").endswith("/v1/traces") else f"{url.rstrip('/')}/v1/traces"
