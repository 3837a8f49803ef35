"""Images by URL: which addresses are asked, and what of an answer counts. No name here leaves this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.images.fetch import ImageFetcher, is_public
from minisgl_backend.images.parts import MAX_FILE_BYTES
from minisgl_backend.openai.image_errors import image_code

Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]
BLOCKED, FAILED, TOO_LARGE = "invalid_image_url", "image_fetch_failed", "image_file_too_large"
PICTURE = b"\x89PNG" + bytes(3000)


def reply(head: str, body: bytes = b"") -> Answer:
    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {head}\r\n\r\n".encode() + body)

    return answer


async def slowly(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def bare(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1\r\n\r\n")


async def without_end(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
        await writer.drain()


OK = f"200 OK\r\nContent-Length: {len(PICTURE)}"
CHUNKS = b"8;x=y\r\n" + PICTURE[:8] + b"\r\nbb4\r\n" + PICTURE[8:] + b"\r\n0\r\n\r\n"
PAGES: dict[str, Answer] = {
    "/length": reply(OK, PICTURE),
    "/closed": reply("200 OK", PICTURE),
    "/chunked": reply("200 OK\r\nTransfer-Encoding: chunked", CHUNKS),
    "/there": reply("302 Found\r\nLocation: /length"),
    "/inside": reply("302 Found\r\nLocation: http://inside.example/length"),
    "/file": reply("302 Found\r\nLocation: file:///etc/passwd"),
    "/loop": reply("302 Found\r\nLocation: /loop"),
    "/elsewhere": reply("302 Found\r\nLocation: http://other.example/length"),
    "/short": reply("200 OK\r\nContent-Length: 9000", PICTURE),
    "/large": reply(f"200 OK\r\nContent-Length: {MAX_FILE_BYTES + 1}"),
    "/lie": reply("200 OK\r\nContent-Length: -5"),
    "/packed": reply(f"{OK}\r\nContent-Encoding: gzip", PICTURE),
    "/gone": reply("404 Not Found"),
    "/busy": reply("429 Too Many Requests"),
    "/empty": bare,
    "/crumbs": reply("200 OK\r\nTransfer-Encoding: chunked", b"1\r\nA\r\n" * 40_000),
    "/noise": reply("\x00\x01"),
    "/head": reply("200 OK\r\nX: " + "y" * 40_000),
    "/slow": slowly,
    "/endless": without_end,
}  # fmt: skip
HOSTS = {
    "open.example": ["127.0.0.1"],
    "below.open.example": ["127.0.0.1"],
    "other.example": ["127.0.0.1"],
    "inside.example": ["10.0.0.1"],
    "both.example": ["127.0.0.1", "10.0.0.1"],
    "none.example": [],
}


class Web:
    """A server, and the names that it was reached by."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.num_resolved = 0

    async def __aenter__(self) -> Web:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            self.asked.append(f"{head.partition('Host: ')[2].partition(chr(13))[0]}{path}")
            await PAGES[path.partition("?")[0]](path, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def resolve(self, host: str, port: int) -> list[str]:
        self.num_resolved += 1
        return HOSTS[host]

    def fetcher(self, *domains: str) -> ImageFetcher:
        return ImageFetcher(
            domains or ("*",),
            resolve=self.resolve,
            are_public=lambda one: one == "127.0.0.1",
            ports={"http": self.port},
        )


def fetched(url: str, *domains: str) -> tuple[bytes, Web]:
    async def run() -> tuple[bytes, Web]:
        async with Web() as web:
            return await web.fetcher(*domains).fetch(url, "image_url"), web

    return asyncio.run(run())


@pytest.mark.parametrize("page", ["length", "closed", "chunked", "there"])
def test_an_image_is_read_however_its_end_is_told(page: str) -> None:
    data, web = fetched(f"http://open.example/{page}?a=%20b")
    assert data == PICTURE
    assert web.asked[0] == f"open.example/{page}?a=%20b"


@pytest.mark.parametrize(
    ("url", "told", "code"),
    [
        ("http://inside.example/length", "public ones", BLOCKED),
        ("http://both.example/length", "public ones", BLOCKED),
        ("http://none.example/length", "public ones", BLOCKED),
        ("http://open.example/inside", "public ones", BLOCKED),
        ("http://open.example/file", "scheme 'file'", BLOCKED),
        ("http://open.example/loop", "more than 3 times", FAILED),
        ("http://open.example:22/length", "port 80", BLOCKED),
        ("http://me:pw@open.example/length", "a user's name", BLOCKED),
        ("http://open.example/a\r\nX: y", "control characters", BLOCKED),
        ("http://open.example/a b", "blanks", BLOCKED),
        ("gopher://open.example/", "scheme 'gopher'", BLOCKED),
        ("http://[::1/", "no URL", BLOCKED),
        ("http:///length", "a host", BLOCKED),
        ("http://open.example/short", "IncompleteReadError", FAILED),
        ("http://open.example/large", str(MAX_FILE_BYTES), TOO_LARGE),
        ("http://open.example/lie", "Content-Length", FAILED),
        ("http://open.example/endless", str(MAX_FILE_BYTES), TOO_LARGE),
        ("http://open.example/packed", "compressed", FAILED),
        ("http://open.example/gone", "status 404", FAILED),
        ("http://open.example/busy", "status 429", FAILED),
        ("http://open.example/noise", "ValueError", FAILED),
        ("http://open.example/empty", "IndexError", FAILED),
        ("http://open.example/crumbs", "chunks", FAILED),
        ("http://a\\.open.example/length", "a host", BLOCKED),
        ("http://open.example/head", "head of more than", FAILED),
        ("http://open.example/" + "a" * 9000, "more than 8192", BLOCKED),
    ],
)
def test_what_is_no_public_image_is_refused(url: str, told: str, code: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^image_url ") as refused:
        fetched(url)
    assert told in str(refused.value)
    assert image_code(str(refused.value)) == code


def test_a_slow_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl_backend.images.fetch._TOTAL_SECONDS", 0.3)
    with pytest.raises(InvalidRequestError, match=r"0\.3 seconds"):
        fetched("http://open.example/slow")


@pytest.mark.parametrize(
    ("domains", "url", "is_allowed"),
    [
        (("open.example",), "http://OPEN.example./length", True),
        (("open.example",), "http://below.open.example/length", False),
        (("*.open.example",), "http://below.open.example/length", True),
        (("*.open.example",), "http://open.example/length", False),
        (("open.example",), "http://open.example/elsewhere", False),
        (("open.example", "other.example"), "http://open.example/elsewhere", True),
    ],
)
def test_domains_are_whole_names(domains: tuple[str, ...], url: str, is_allowed: bool) -> None:
    if is_allowed:
        assert fetched(url, *domains)[0] == PICTURE
    else:
        with pytest.raises(InvalidRequestError, match="has host"):
            fetched(url, *domains)


def test_equal_urls_at_a_time_are_fetched_once() -> None:
    async def run() -> tuple[list[bytes], Web]:
        async with Web() as web:
            urls = [(f"part {number}", "http://open.example/length") for number in range(20)]
            return await web.fetcher().fetch_all(urls, 1 << 20), web

    found, web = asyncio.run(run())
    assert (set(found), len(found), web.num_resolved, len(web.asked)) == ({PICTURE}, 20, 1, 1)


def test_all_images_of_a_request_are_bounded() -> None:
    async def run() -> list[bytes]:
        async with Web() as web:
            return await web.fetcher().fetch_all([("a", "http://open.example/length")] * 3, 2 * len(PICTURE))

    with pytest.raises(InvalidRequestError, match="a brings the request's images to"):
        asyncio.run(run())


def test_a_fetch_ends_with_the_last_who_waits() -> None:
    async def run() -> None:
        async with Web() as web:
            fetcher = web.fetcher()
            waiting = [asyncio.create_task(fetcher.fetch("http://open.example/slow", "x")) for _ in range(2)]
            await asyncio.sleep(0.1)
            waiting[0].cancel()
            await asyncio.sleep(0.05)
            assert len(fetcher._running) == 1
            waiting[1].cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert not fetcher._running

    asyncio.run(run())


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.0.1", "0.0.0.0", "100.64.0.1", "224.0.0.1", "0x7f.1"),
        *("::1", "fe80::1%eth0", "fc00::1", "::ffff:10.0.0.1", "::ffff:127.0.0.1", "64:ff9b::a00:1", "2002:a00:1::"),
        *("2001:0:1:2:3:4:5:6", "fec0::2", "::7f00:1", "::ffff:0:a00:1", "64:ff9b:1::a9fe:a9fe"),
        *("168.63.129.16", "192.0.0.192", "3fff::1"),
    ],
)
def test_private_addresses_in_every_form(address: str) -> None:
    assert not is_public(address)


def test_public_addresses() -> None:
    assert all(map(is_public, ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]))
