"""/v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import FastAPI, Request, Response

from minisgl_backend.openai.answers import Answer, Header
from minisgl_backend.openai.anthropic import MessagesAnswer
from minisgl_backend.openai.context import context_of
from minisgl_backend.openai.encoding import json_response
from minisgl_backend.openai.endpoint import Endpoint
from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.requests.anthropic import WORDS, CountTokensRequest, MessagesRequest
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.triton import Generation


def add_routes(app: FastAPI, endpoint: Endpoint) -> None:
    @app.post("/v1/messages")
    async def messages(request: Request, body: MessagesRequest) -> Response:
        body.check()
        context = context_of(request, body)
        chat, names = _chat(body, endpoint)
        stops = body.stop_sequences or ()

        async def start() -> tuple[Answer, Sequence[Generation]]:
            header = Header(f"msg_{context.request_id}", int(time.time()), await endpoint.model.resolve(body.model))
            added_tokens = (await endpoint.model.info()).added_tokens if stops else ()
            generation, parsers = await endpoint.start_chat(chat, context, names, figures=True)
            answer = MessagesAnswer(generation, header, parsers[0] if parsers else None, stops, added_tokens)
            return answer, [generation]

        return await endpoint.respond(request, start, MessagesAnswer, stream=bool(body.stream), context=context)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> Response:
        body.check()
        chat, names = _chat(body, endpoint)
        with endpoint.counted():
            await endpoint.model.resolve(body.model)
            prompt = await endpoint.chat_prompt(chat, chat.messages)
            found = await endpoint.triton.tokenize(prompt, ["input_ids"], names)
        return json_response({"input_tokens": len(found["input_ids"])})


def _chat(body: CountTokensRequest, endpoint: Endpoint) -> tuple[ChatRequest, dict[str, str]]:
    """The chat, and the client's names of fields that the server knows by another name."""
    try:
        chat = body.as_chat()
        chat.check()
    except ApiError as error:
        raise error.renamed(WORDS) from None
    endpoint.note_left_out(body.left_out)
    names = {name: WORDS.get(called, called) for name, called in chat.names().items()}
    return chat, {**WORDS, **names}
