"""/v1/batches, and what computes all batches."""

from __future__ import annotations

import asyncio
from functools import partial

from fastapi import APIRouter, FastAPI, Request, Response

from minisgl_backend.openai.batches.batch_runner import BatchRunner
from minisgl_backend.openai.batches.batches import is_of_messages
from minisgl_backend.openai.encoding import json_response
from minisgl_backend.openai.endpoint import Endpoint
from minisgl_backend.openai.in_process import post
from minisgl_backend.openai.paging import page
from minisgl_backend.openai.requests.batches import BatchRequest
from minisgl_backend.openai.storage import StorageRoute

_MAX_LISTED = 100


def add_routes(app: FastAPI, endpoint: Endpoint) -> None:
    batches, files, settings = endpoint.batches, endpoint.files, endpoint.settings
    inside = partial(post, app)
    runner = BatchRunner(batches, files, inside, settings.max_batch_requests, settings.image_body_bytes)
    endpoint.run_while_open(runner.run)
    router = APIRouter(route_class=StorageRoute)

    @router.post("/v1/batches")
    async def create(body: BatchRequest) -> Response:
        files.get(body.input_file_id, "input_file_id", 400)
        files.check_room()
        return json_response(batches.shown(await asyncio.to_thread(batches.add, body)))

    @router.get("/v1/batches")
    async def listed(request: Request) -> Response:
        found = await asyncio.to_thread(batches.all)
        shown = [batches.shown(batch) for batch in found if not is_of_messages(batch)]
        return json_response(page(shown, request, max_limit=_MAX_LISTED, default=20))

    @router.get("/v1/batches/{batch_id}")
    async def find(batch_id: str) -> Response:
        return json_response(batches.shown(batches.get(batch_id)))

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str) -> Response:
        batch = batches.get(batch_id)
        batches.cancel(batch)
        return json_response(batches.shown(batch))

    app.include_router(router)
