"""Server-sent events: lines that are mostly made beforehand, and the response that sends them."""

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
    """One line of the stream."""
    return b"data: " + encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """One line of a stream whose events have names, with the name before it."""
    return b"event: " + name.encode() + b"\n" + event(value)


def line_begin(header: dict[str, Any]) -> bytes:
    """A chunk up to the index of its one choice, to be filled in with `%`."""
    return b"data: " + encode(header)[:-1].replace(b"%", b"%%") + b',"choices":[{"index":%d,'


class EventStream(Response):
    """Sends lines as they come. An error behind the first of them becomes a line, since the status is long sent."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        lines: AsyncGenerator[bytes],
        error_line: Callable[[ApiError], bytes],
        watch: ClientWatch,
        headers: dict[str, str] | None = None,
    ) -> None:
        self._first = first
        self._lines = lines
        self._error_line = error_line
        self._watch = watch
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for line in self._lines:
                await send({"type": "http.response.body", "body": line, "more_body": True})
        except ClientLeft:
            return
        except ApiError as error:
            await send({"type": "http.response.body", "body": self._error_line(error), "more_body": True})
        finally:
            self._watch.close()
            await self._lines.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
