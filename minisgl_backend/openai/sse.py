"""Server-sent events, mostly pre-encoded, and the response that sends them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl_backend.openai.errors import ApiError, ClientLeft
from minisgl_backend.openai.leaving import ClientWatch

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


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
    """Sends events as they come. An error after the first event is sent as an event, since the status has been sent."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes],
        error_event: Callable[[ApiError], bytes],
        watch: ClientWatch,
        headers: dict[str, str] | None = None,
    ) -> None:
        self._first = first
        self._events = events
        self._error_event = error_event
        self._watch = watch
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except ClientLeft:
            return
        except ApiError as error:
            await send({"type": "http.response.body", "body": self._error_event(error), "more_body": True})
        finally:
            self._watch.close()
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
