"""A request to the endpoint's own application, from inside: what a batch's lines are."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Scope

INSIDE = "minisgl.inside"  # a key of the scope that no client can set: it needs no API key


async def post(app: ASGIApp, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
    """(status, body) of the answer in one piece."""
    status, parts, unread = 500, [], [body]

    async def receive() -> MutableMapping[str, Any]:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()  # this client never leaves
        raise AssertionError

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
    try:
        await app(scope, receive, send)
    except Exception:  # Starlette raises what it has answered with 500
        if not parts:
            raise
    return status, b"".join(parts)
