"""Requests refused before they are read: bodies over the limit, and missing API keys."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl_backend.openai.error_shapes import shaped
from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.in_process import INSIDE
from minisgl_backend.openai.page import PAGE_FILES
from minisgl_backend.openai.sse import encode

TOO_LARGE = "body_too_large"

_OPEN_PATHS = ("/", "/health", "/metrics", "/version")  # these do not use the model


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(f"{PAGE_FILES}/")


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send, *, close: bool = False) -> None:
    """Responds with the error. `close`: also closes the connection, since the rest of the body was not read."""
    headers = {**error.headers, **({"connection": "close"} if close else {})}
    body = shaped(error, scope["path"])
    response = Response(encode(body), error.status, headers, media_type="application/json")
    await response(scope, receive, send)


class BodyLimit:
    """Responds 413 to a body that is too long: before reading it if it declares its length, otherwise while reading."""

    def __init__(self, app: ASGIApp, most_bytes: int, by_path: Mapping[str, int]) -> None:
        """`by_path`: limits other than `most_bytes`."""
        self._app = app
        self._most_bytes = most_bytes
        self._by_path = by_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        most = self._by_path.get(scope["path"], self._most_bytes)
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length) > most:
            await refuse(self._error(most), scope, receive, send, close=True)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                if read > most:
                    # FastAPI lets no other error through while it reads a body.
                    raise HTTPException(413, self._error(most).message, {"connection": "close"})
            return message

        await self._app(scope, counted, send)

    @staticmethod
    def _error(most: int) -> ApiError:
        message = f"the body is longer than {most} bytes, all that this server reads"
        return ApiError(413, message, code=TOO_LARGE)


class ApiKeys:
    """Responds 401 to requests without a valid key, except for paths that do not use the model."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or _is_open(scope["path"]) or scope["method"] == "OPTIONS"
        is_open = is_open or INSIDE in scope
        given = "" if is_open else _given_key(Headers(scope=scope))
        number = 0 if is_open else self._find(given)
        if number:
            scope.setdefault("state", {})["tenant"] = f"key-{number}"
        if is_open or number:
            await self._app(scope, receive, send)
            return
        wrong = "the API key is none of this server's" if given else "this server needs an API key"
        error = ApiError(401, f"{wrong}; allowed: Authorization: Bearer KEY", code="invalid_api_key")
        await refuse(error, scope, receive, send)

    def _find(self, header: str) -> int:
        """The key's number, counted from 1; 0: invalid."""
        scheme, _, key = header.partition(" ")
        given = key.strip().encode()
        found = [secrets.compare_digest(given, known) for known in self._keys]  # all of them: the time reveals nothing
        return found.index(True) + 1 if scheme.lower() == "bearer" and any(found) else 0


def _given_key(headers: Headers) -> str:
    """The key as OpenAI's or Anthropic's clients send it."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or ("" if key is None else f"Bearer {key}")
