"""The ASGI application: what is done before a request reaches its route, and all routes of the table."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

import minisgl_backend
from minisgl_backend.host.options.endpoint import EndpointSettings
from minisgl_backend.openai.browsers import BrowserGuard
from minisgl_backend.openai.endpoint import Endpoint
from minisgl_backend.openai.error_answers import add_error_answers
from minisgl_backend.openai.limits import ApiKeys, BodyLimit
from minisgl_backend.openai.routes.table import FAMILIES, Family
from minisgl_backend.openai.tracing import TraceRequests, Tracing
from minisgl_backend.openai.unknown_fields import IgnoreUnknownFields


def create_app(settings: EndpointSettings, families: Sequence[Family] = FAMILIES) -> FastAPI:
    """The ASGI application of one worker."""
    endpoint, families = Endpoint(settings), [family for family in families if family.is_served(settings)]
    tracing = Tracing(settings.otlp_endpoint) if settings.otlp_endpoint else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await endpoint.open()
        yield
        await endpoint.close()
        if tracing is not None:
            tracing.close()

    app = FastAPI(
        title="minisgl-backend",
        version=minisgl_backend.__version__,
        description="An OpenAI-compatible endpoint before Triton Inference Server.",
        lifespan=lifespan,
        # Both would load scripts from other hosts; /openapi.json is available instead.
        docs_url=None,
        redoc_url=None,
    )
    app.state.tenants = settings.tenants
    add_error_answers(app)
    # The last one added runs first.
    if settings.ignore_unknown_fields:
        app.add_middleware(IgnoreUnknownFields)
    limits = ChainMap(*(dict(family.body_limits) for family in families))
    limits = limits.new_child({path: settings.image_body_bytes for family in families for path in family.image_paths})
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, by_path=limits)
    if settings.api_keys:
        open_paths = [path for family in families for path in family.open_paths]
        app.add_middleware(ApiKeys, keys=settings.api_keys, open_paths=open_paths)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(
        BrowserGuard,
        host=settings.host,
        allowed_hosts=settings.allowed_hosts,
        allowed_origins=settings.allowed_origins,
    )
    if tracing is not None:
        operations = ChainMap(*(dict(family.operations) for family in families))
        app.add_middleware(TraceRequests, tracing=tracing, operations=operations)
    for family in families:
        family.add_routes(app, endpoint)
    return app
