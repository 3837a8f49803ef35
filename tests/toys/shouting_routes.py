"""A toy family of routes: a completion in capitals, whole or as a stream, and a path that needs no key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from fastapi import FastAPI, Request, Response

from minisgl_backend.openai.answers import Answer
from minisgl_backend.openai.context import context_of
from minisgl_backend.openai.encoding import encode, json_response
from minisgl_backend.openai.endpoint import Endpoint
from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.requests.base import Generating
from minisgl_backend.openai.sse import DONE, KEEP_ALIVE, event
from minisgl_backend.openai.triton import Generation, Prompt


class ShoutRequest(Generating):
    """POST /v1/shout."""

    prompt: str


class ShoutAnswer:
    """One request in progress."""

    keep_alive = KEEP_ALIVE

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def events(self) -> AsyncIterator[bytes]:
        async for text in self._texts():
            yield event({"shout": text})
        yield DONE

    async def whole(self) -> bytes:
        return encode({"shout": "".join([text async for text in self._texts()])})

    @staticmethod
    def error_event(error: ApiError) -> bytes:
        return event(error.body)

    async def _texts(self) -> AsyncIterator[str]:
        while (delta := await self._generation.next()) is not None:
            yield delta.text.upper()
        await self._generation.drain()


def add_routes(app: FastAPI, endpoint: Endpoint) -> None:
    @app.post("/v1/shout")
    async def shout(request: Request, body: ShoutRequest) -> Response:
        body.check()
        context = context_of(request, body)

        async def start() -> tuple[Answer, Sequence[Generation]]:
            await endpoint.model.resolve(body.model)
            generation = endpoint.triton.start(Prompt(text=body.prompt), body.sampling(), context, body.names())
            return ShoutAnswer(generation), [generation]

        return await endpoint.respond(request, start, ShoutAnswer, stream=bool(body.stream), context=context)

    @app.get("/shout/volume")
    async def volume() -> Response:
        return json_response({"volume": 11})
