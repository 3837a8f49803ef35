"""Server-sent events, mostly pre-encoded, and the response that sends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl_backend.openai.answers import PendingAnswer, StreamSigns
from minisgl_backend.openai.encoding import encode
from minisgl_backend.openai.errors import ApiError, ClientLeft
from minisgl_backend.openai.leaving import ClientWatch

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which readers of events skip
SILENT_SECONDS = 5.0  # the longest that a stream says nothing; proxies give up after 15 to 60


def event(value: Any) -> bytes:
    """One event of the stream."""
    return b"data: " + encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """One named event: its name, then its data."""
    return b"event: " + name.encode() + b"\n" + event(value)


def event_prefix(header: dict[str, Any]) -> bytes:
    """A chunk up to the index of its only choice, to be filled in with `%`."""
    return b"data: " + encode(header)[:-1].replace(b"%", b"%%") + b',"choices":[{"index":%d,'


class EventStream(Response):
    """Sends events as they come, and signs of life while none comes.

    An error after the head is sent as an event, since the status has been sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        pending: PendingAnswer,
        signs: StreamSigns,
        first: asyncio.Task[bytes],
        events: AsyncGenerator[bytes],
        watch: ClientWatch,
        headers: dict[str, str] | None = None,
    ) -> None:
        """`events`: those of the answer; `first` is to have the first of them. `signs`: until it has started."""
        self._pending = pending
        self._unstarted = signs
        self._first = first
        self._events = events
        self._watch = watch
        self._said_at = 0.0  # by the event loop's clock
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def say(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._said_at = loop.time()

        loop = asyncio.get_running_loop()
        signs = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if not self._first.done():
                await say(self._signs.keep_alive)
            signs = loop.create_task(self._say_signs(say))
            await say(await self._first)
            async for data in self._events:
                await say(data)
        except ClientLeft:
            return
        except ApiError as error:
            await say(self._signs.error_event(error))
        finally:
            if signs is not None:
                signs.cancel()
            self._watch.close()
            self._first.cancel()
            await asyncio.wait([self._first])
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @property
    def _signs(self) -> StreamSigns:
        return self._pending.answer or self._unstarted

    async def _say_signs(self, say: Callable[[bytes], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            silent = loop.time() - self._said_at
            if silent < SILENT_SECONDS:
                await asyncio.sleep(SILENT_SECONDS - silent)
            else:
                await say(self._signs.keep_alive)
