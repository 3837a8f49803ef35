"""/v1/messages/batches, of Anthropic's API."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response

from minisgl_backend.openai.batches.batches import Batch
from minisgl_backend.openai.batches.message_batches import PATH, MessageBatches
from minisgl_backend.openai.encoding import json_response
from minisgl_backend.openai.endpoint import Endpoint
from minisgl_backend.openai.storage import StorageRoute


def add_routes(app: FastAPI, endpoint: Endpoint) -> None:
    kept = MessageBatches(endpoint.batches, endpoint.files, endpoint.settings.image_body_bytes)
    router = APIRouter(route_class=StorageRoute)

    def shown(request: Request, batches: Sequence[Batch]) -> list[dict[str, Any]]:
        return [kept.shown(batch, str(request.base_url)) for batch in batches]

    @router.post(PATH)
    async def create(request: Request) -> Response:
        batch = await asyncio.to_thread(kept.create, await request.body())
        return json_response(shown(request, [batch])[0])

    @router.get(PATH)
    async def listed(
        request: Request, limit: int = 20, after_id: str | None = None, before_id: str | None = None
    ) -> Response:
        found = await asyncio.to_thread(kept.page, limit, after_id, before_id)
        return json_response({**found, "data": shown(request, found["data"])})

    @router.get(PATH + "/{batch_id}")
    async def find(request: Request, batch_id: str) -> Response:
        return json_response(shown(request, [kept.get(batch_id)])[0])

    @router.post(PATH + "/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> Response:
        return json_response(shown(request, [kept.cancel(batch_id)])[0])

    @router.get(PATH + "/{batch_id}/results")
    async def results(batch_id: str) -> Response:
        return kept.results(batch_id)

    @router.delete(PATH + "/{batch_id}")
    async def delete(batch_id: str) -> Response:
        await asyncio.to_thread(kept.delete, batch_id)
        return json_response({"id": batch_id, "type": "message_batch_deleted"})

    app.include_router(router)
