"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import FastAPI, Request, Response

from minisgl_backend.openai.answers import Answer, Header
from minisgl_backend.openai.chat import ChatAnswer
from minisgl_backend.openai.context import context_of
from minisgl_backend.openai.endpoint import Endpoint
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.triton import Generation


def add_routes(app: FastAPI, endpoint: Endpoint) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        body.check()
        context = context_of(request, body)

        async def start() -> tuple[Answer, Sequence[Generation]]:
            name = await endpoint.model.resolve(body.model)
            header = Header(f"chatcmpl-{context.request_id}", int(time.time()), name)
            generation, parsers = await endpoint.start_chat(body, context, body.names(), figures=body.wants_figures)
            return ChatAnswer(body, generation, header, parsers), [generation]

        return await endpoint.respond(request, start, ChatAnswer, stream=bool(body.stream), context=context)
