"""What is done before requests are read: limits of their bodies, which may be compressed, and API keys."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl_backend.openai.content_encoding import ENCODINGS, DecodeError, Decoder, encodings_of
from minisgl_backend.openai.encoding import json_response
from minisgl_backend.openai.errors import ApiError, shaped
from minisgl_backend.openai.in_process import INSIDE

TOO_LARGE = "body_too_large"
UNSUPPORTED = "unsupported_content_encoding"


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send, *, close: bool = False) -> None:
    """Responds with the error. `close`: also closes the connection, since the rest of the body was not read."""
    headers = {**error.headers, **({"connection": "close"} if close else {})}
    if error.status == 415:
        headers["accept-encoding"] = ", ".join(ENCODINGS)
    await json_response(shaped(error, scope["path"]), error.status, headers)(scope, receive, send)


class BodyLimit:
    """Responds 413 to a body that is too long: before reading it if it declares its length, otherwise while reading.

    Compressed bodies are decoded, and the limit is that of the decoded body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, by_path: Mapping[str, int]) -> None:
        """`by_path`: limits other than `max_bytes`."""
        self._app = app
        self._max_bytes = max_bytes
        self._by_path = by_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        max_bytes = self._by_path.get(scope["path"], self._max_bytes)
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > max_bytes:
            await refuse(_too_large(max_bytes), scope, receive, send, close=True)
            return
        encodings = encodings_of(",".join(headers.getlist("content-encoding")))
        if len(encodings) > 1 or (encodings and encodings[0] not in ENCODINGS):
            named, allowed = ", ".join(encodings)[:60], ", ".join(ENCODINGS)
            error = ApiError(415, f"Content-Encoding is {named}; allowed: one of {allowed}, or none", code=UNSUPPORTED)
            await refuse(error, scope, receive, send, close=True)
            return
        body = _Body(receive, max_bytes, Decoder(encodings[0]) if encodings else None)
        await self._app(scope, body.receive, send)


class _Body:
    """The body of one request as the application reads it: decoded and bounded."""

    def __init__(self, receive: Receive, max_bytes: int, decoder: Decoder | None) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._decoder = decoder
        self._length = 0  # as it is read
        self._received = 0  # bytes, which may be more: compressed data may stand for nothing
        self._pieces: Iterator[bytes] = iter(())
        self._is_last = False  # all has been received

    async def receive(self) -> Message:
        """The next message. Raises HTTPException: FastAPI lets no other error through while it reads a body."""
        if self._decoder is None:
            return await self._received_message()
        try:
            return await self._decoded(self._decoder)
        except DecodeError as error:
            raise HTTPException(400, f"the body cannot be decoded: {error}", {"connection": "close"}) from None

    async def _decoded(self, decoder: Decoder) -> Message:
        while True:
            for piece in self._pieces:
                if piece:
                    self._length += len(piece)
                    self._check(self._length)
                    return {"type": "http.request", "body": piece, "more_body": True}
            if self._is_last:
                decoder.finish()
                self._decoder = None  # what follows is no body
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._received_message()
            if message["type"] != "http.request":
                return message
            self._is_last = not message.get("more_body", False)
            self._pieces = decoder.decode(message.get("body", b""))

    async def _received_message(self) -> Message:
        message = await self._receive()
        self._received += len(message.get("body", b""))
        self._check(self._received)
        return message

    def _check(self, length: int) -> None:
        if length > self._max_bytes:
            raise HTTPException(413, _too_large(self._max_bytes).message, {"connection": "close"})


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is longer than {max_bytes} bytes, all that this server reads"
    return ApiError(413, message, code=TOO_LARGE)


class ApiKeys:
    """Responds 401 to requests without a valid key, except for paths that do not use the model."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Sequence[str] = ()) -> None:
        """`open_paths`: those without a key; one that ends in /* stands for all below it."""
        self._app = app
        self._open = frozenset(open_paths)
        self._open_below = tuple(path.removesuffix("*") for path in open_paths if path.endswith("/*"))
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["method"] == "OPTIONS" or INSIDE in scope
        is_open = is_open or scope["path"] in self._open or scope["path"].startswith(self._open_below)
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
