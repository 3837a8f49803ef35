"""/v1/models."""

from __future__ import annotations

from fastapi import FastAPI, Response

from minisgl_backend.openai.encoding import json_response
from minisgl_backend.openai.endpoint import Endpoint


def add_routes(app: FastAPI, endpoint: Endpoint) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": await endpoint.model.cards()})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        await endpoint.model.resolve(name)
        return json_response(await endpoint.model.card(name))
