"""/health, /metrics and /version: the server's state; and its page to chat. None of them uses the model."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from starlette.responses import Response

import minisgl_backend
from minisgl_backend.openai.encoding import json_response
from minisgl_backend.openai.endpoint import Endpoint
from minisgl_backend.openai.page import PAGE_FILES, add_page

OPEN_PATHS = ("/", f"{PAGE_FILES}/*", "/health", "/metrics", "/version")


def add_routes(app: FastAPI, endpoint: Endpoint) -> None:
    @app.get("/health")
    async def health() -> Response:
        reason = await _not_ready_reason(endpoint)
        return json_response({"ready": reason is None, "reason": reason or ""}, 200 if reason is None else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(await endpoint.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": minisgl_backend.__version__})

    add_page(app)


async def _not_ready_reason(endpoint: Endpoint) -> str | None:
    if not await endpoint.triton.is_ready():
        return "the server is not ready"
    return "the engine is down" if await endpoint.metrics.engine_is_down() else None
