"""Compressed request bodies: decoded in pieces, bounded, and refused where they cannot be."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI, Request

from minisgl_backend.openai.content_encoding import DecodeError, Decoder
from minisgl_backend.openai.error_answers import add_error_answers
from minisgl_backend.openai.limits import BodyLimit

MOST = 3 << 20
TEXT = json.dumps({"text": "é" * 2000, "numbers": list(range(3000))}).encode()


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def two_members(data: bytes) -> bytes:
    return gzip.compress(data[:1000]) + gzip.compress(data[1000:])


PACKED: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    ("GZip", two_members),
    ("identity, gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("identity", bytes),
]


def post(
    body: bytes, encoding: str, size: int = 1 << 16, path: str = "/read", *, declared: bool = True
) -> tuple[int, Any, dict[str, str]]:
    """(status, JSON, headers) for a body that comes in pieces of `size` bytes, and declares its length or not."""
    app = FastAPI()
    add_error_answers(app)
    app.add_middleware(BodyLimit, max_bytes=MOST, by_path={})

    @app.post("/read")
    async def read(body: dict[str, Any]) -> dict[str, Any]:
        return body

    @app.post("/v1/messages")
    async def whole(request: Request) -> dict[str, Any]:
        return {"length": len(await request.body())}

    pieces = [body[start : start + size] for start in range(0, len(body), size)] or [b""]
    unread = [{"type": "http.request", "body": one, "more_body": n < len(pieces)} for n, one in enumerate(pieces, 1)]
    sent: list[Any] = []

    async def receive() -> Any:
        return unread.pop(0) if unread else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    head = [(b"content-type", b"application/json"), (b"content-encoding", encoding.encode())]
    head += [(b"content-length", str(len(body)).encode())] if declared else []
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": head}
    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], json.loads(b"".join(part.get("body", b"") for part in sent)), headers


@pytest.mark.parametrize(("encoding", "pack"), PACKED)
@pytest.mark.parametrize("size", [1, 1000, 1 << 16])
def test_a_compressed_body_is_the_body(encoding: str, pack: Callable[[bytes], bytes], size: int) -> None:
    status, found, _ = post(pack(TEXT), encoding, size)
    assert (status, found) == (200, json.loads(TEXT))


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "deflate, gzip", "utf-8"])
@pytest.mark.parametrize("path", ["/read", "/v1/messages"])
def test_another_encoding_is_refused_by_name(encoding: str, path: str) -> None:
    status, found, headers = post(gzip.compress(TEXT), encoding, path=path)
    message = f"Content-Encoding is {encoding}; allowed: one of gzip, deflate, or none"
    assert (status, found["error"]["message"]) == (415, message)
    assert (headers["accept-encoding"], headers["connection"]) == ("gzip, deflate", "close")
    assert ("type" in found) == (path == "/v1/messages")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    "body", [TEXT, gzip.compress(TEXT)[:-5], zlib.compress(TEXT)[:-1], zlib.compress(TEXT) + b"x", b"\x78"]
)
def test_what_cannot_be_decoded_is_told(encoding: str, body: bytes) -> None:
    status, found, _ = post(body, encoding, size=100)
    assert (status, found["error"]["param"]) == (400, "body")
    assert f" {encoding} data" in found["error"]["message"]


@pytest.mark.parametrize(("encoding", "pack"), PACKED)
@pytest.mark.parametrize("size", [100, 1 << 22])
def test_the_limit_is_that_of_the_decoded_body(encoding: str, pack: Callable[[bytes], bytes], size: int) -> None:
    fits = post(pack(b" " * MOST), encoding, size, "/v1/messages")
    assert fits[:2] == (200, {"length": MOST})
    assert post(pack(b" " * (MOST + 1)), encoding, size, "/v1/messages")[0] == 413


def test_a_small_body_that_becomes_a_large_one_comes_in_pieces() -> None:
    packed = gzip.compress(bytes(200 << 20), 1)
    pieces = itertools.islice(Decoder("gzip").decode(packed), 5)
    assert [len(piece) for piece in pieces] == [1 << 20] * 5
    assert post(packed, "gzip", 1 << 22)[0] == 413
    with pytest.raises(DecodeError):
        list(Decoder("gzip").decode(b"nothing"))


def test_compressed_data_that_stands_for_nothing_is_bounded() -> None:
    empty_blocks = b"\x00\x00\x00\xff\xff" * (MOST // 5 + 1)
    assert post(empty_blocks, "deflate", path="/v1/messages", declared=False)[0] == 413
    assert post(gzip.compress(b"") * 1001, "gzip", path="/v1/messages")[0] == 400


def test_an_empty_body_stays_empty() -> None:
    assert post(b"", "gzip", path="/v1/messages")[:2] == (200, {"length": 0})
