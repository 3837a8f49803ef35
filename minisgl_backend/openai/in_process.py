"""Sends a request to the endpoint's own application in-process, as for the lines of a batch."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Scope

_LEAVING_SECONDS = 5.0  # until the server has noticed it
INSIDE = "minisgl.inside"  # a scope key that no client can set: such requests need no API key


async def post(app: ASGIApp, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
    """(status, body) of the whole response. A cancelled caller counts as a client that closes its connection."""
    status, parts, unread, left = 500, [], [body], asyncio.Event()

    async def receive() -> MutableMapping[str, Any]:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(bytes(message.get("body", b"")))

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())],
        "client": None,
        "server": None,
        INSIDE: True,
    }
    answered = asyncio.ensure_future(app(scope, receive, send))
    try:
        await asyncio.shield(answered)
    except asyncio.CancelledError:
        left.set()
        await asyncio.wait([answered], timeout=_LEAVING_SECONDS)
        answered.cancel()
        raise
    except Exception:  # Starlette re-raises errors that it has answered with 500
        if not parts:
            raise
    return status, b"".join(parts)
