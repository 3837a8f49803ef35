"""Spans of requests, as a collector gets them; one that is not there costs no request anything."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.testclient import TestClient

from minisgl_backend.host.options.endpoint import EndpointSettings
from minisgl_backend.openai.app import create_app
from minisgl_backend.openai.routes.pooling import OPERATIONS
from minisgl_backend.openai.tracing import MAX_QUEUED, RequestTrace, TraceRequests, Tracing
from minisgl_backend.openai.vectors import VectorCall, Vectors

pytest.importorskip("opentelemetry.sdk")

TRACE_ID, SPAN_ID = "ab" * 16, "cd" * 8
FIGURES = {"arrival": 1_000, "first_scheduled": 2_000, "first_token": 5_000, "last_token": 9_000}
ANSWER: Any = SimpleNamespace(
    num_prompt_tokens=7,
    num_output_tokens=3,
    num_cached_tokens=4,
    perf_metrics={f"{name}_time_ns": value for name, value in FIGURES.items()},
)


def serve(tracing: Tracing, headers: dict[str, str], status: int = 200, path: str = "/v1/chat/completions") -> Any:
    """A request through the middleware; what the application saw of its trace."""
    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        trace: RequestTrace | None = scope.get("state", {}).get("trace")
        if trace is not None:
            seen.update(headers=dict(trace.headers), recorded=trace.is_recorded)
            trace.note_model("mine-1", "demo")
            trace.note_answer([ANSWER])
        await send({"type": "http.response.start", "status": status})

    async def nothing(*_: Any) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": path}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(TraceRequests(app, tracing)({**scope, "headers": raw}, nothing, nothing))  # type: ignore[arg-type]
    return seen


def test_a_collector_sees_the_spans_of_a_request_in_its_own_trace() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracing = Tracing("http://unused", exporter)
    seen = serve(tracing, {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}, status=503)
    assert not serve(tracing, {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"})["recorded"]
    assert serve(tracing, {}, path="/tokenize") == {}
    tracing.close()
    *phases, request = exporter.get_finished_spans()
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert [(span.start_time, span.end_time) for span in phases] == [(1000, 2000), (2000, 5000), (5000, 9000)]
    assert {span.parent.span_id for span in phases} == {request.context.span_id}
    assert request.name == "POST /v1/chat/completions"
    assert format(request.context.trace_id, "032x") == TRACE_ID
    assert format(request.parent.span_id, "016x") == SPAN_ID
    assert seen["headers"] == {
        "traceparent": f"00-{TRACE_ID}-{request.context.span_id:016x}-01",
        "tracestate": "vendor=1",
    }
    assert dict(request.attributes) == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "gen_ai.request.id": "mine-1",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "demo",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "http.response.status_code": 503,
    }
    assert not request.status.is_ok


def test_images_have_spans_before_those_of_the_server() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracing = Tracing("http://unused", exporter)
    trace = tracing.begin("/v1/chat/completions", Headers({}))
    trace.note_images(100, 400)
    trace.note_answer([ANSWER, ANSWER])
    trace.end(200)
    tracing.close()
    found = [(span.name, span.start_time, span.end_time) for span in exporter.get_finished_spans()]
    assert found[:3] == [("images fetch", 100, 400), ("images decode", 400, 1000), ("queue", 1000, 2000)]


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/embed", "embeddings"),
        ("/rerank", "rerank"),
        ("/v2/rerank", "rerank"),
        ("/score", "score"),
    ],
)
def test_requests_that_are_pooled_have_spans_with_their_tokens(path: str, operation: str) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    async def result(self: Any) -> Vectors:
        return Vectors(rows=[b"\0" * 8], scores=[0.5], prompt_lengths=[7, 2], num_cached_tokens=4)

    exporter = InMemorySpanExporter()
    tracing = Tracing("http://unused", exporter)
    app = create_app(EndpointSettings(port=0, served_model_names=("demo",)))
    body = {"/v1/embeddings": {"input": "a"}, "/embed": {"inputs": "a"}, "/score": {"text_1": "a", "text_2": "b"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VectorCall, "result", result)
        patch.setattr(VectorCall, "__init__", lambda *_: None)
        with TestClient(TraceRequests(app, tracing, OPERATIONS), base_url="http://localhost") as client:
            answer = client.post(path, json=body.get(path, {"query": "a", "documents": ["b"]}))
    assert answer.status_code == 200, answer.text
    tracing.close()
    (span,) = exporter.get_finished_spans()
    assert span.attributes["gen_ai.operation.name"] == operation
    assert span.attributes["gen_ai.usage.input_tokens"] == 9
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 4


def test_an_absent_collector_costs_no_request_anything() -> None:
    """More spans than the queue holds, and nobody at the other end: none waits, and the end is soon."""
    tracing = Tracing("http://127.0.0.1:9")  # discard
    started = time.process_time()
    for _ in range(MAX_QUEUED // 2):
        trace = tracing.begin("/v1/completions", Headers({}))
        trace.note_answer([ANSWER])
        trace.end(200)
    assert time.process_time() - started < 5.0
    started = time.monotonic()
    tracing.close()
    assert time.monotonic() - started < 30.0
