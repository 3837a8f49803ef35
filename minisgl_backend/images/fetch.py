"""Images by URL, for servers that may fetch them: the only code here that opens connections to addresses of clients.

Off unless domains are allowed. A name is resolved once, every address that it has must be a public one, and the
connection goes to the address that was checked, so that no second answer of a resolver counts. Redirects are URLs like
the first one. Bytes are counted, whatever a header says, and all times are bounded (OWASP's page on server-side request
forgery lists what this is about).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urljoin, urlsplit

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.images.parts import MAX_FILE_BYTES


class _Failed(Exception):
    """Why a URL gave no bytes."""


PORTS = {"http": 80, "https": 443}
ANY = "*"  # as a domain: all public hosts
_MAX_REDIRECTS, _MAX_URL, _MAX_HEAD = 3, 8192, 32 << 10
_CONNECT_SECONDS, _TOTAL_SECONDS = 3.0, 10.0
_MAX_AT_ONCE, _MAX_OF_REQUEST = 64, 8
_REDIRECTS = (301, 302, 303, 307, 308)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]  # host, port -> addresses


async def resolve_addresses(host: str, port: int) -> Sequence[str]:
    """By the system's resolver. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def is_public(address: str) -> bool:
    """Whether an IP address, or the IPv4 address that one of version 6 stands for, is reachable from everywhere."""
    try:
        one = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(one, ipaddress.IPv6Address):
        inner = one.ipv4_mapped or one.sixtofour
        if one.teredo is not None:
            return False
        if one in ipaddress.ip_network("64:ff9b::/96"):  # NAT64
            inner = ipaddress.IPv4Address(int(one) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return one.is_global and not one.is_multicast


@dataclass(frozen=True)
class Target:
    """One URL, checked in all that needs no network."""

    scheme: str
    host: str
    port: int
    path: str  # with the query

    @classmethod
    def of(cls, url: str) -> Target:
        """Raises _Failed."""
        if len(url) > _MAX_URL or any(ord(one) <= 32 or ord(one) == 127 for one in url):
            raise _Failed(f"has blanks or control characters, or more than {_MAX_URL} characters")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
            host = host.rstrip(".").encode("idna").decode("ascii") if not host.isascii() else host.rstrip(".")
        except ValueError as error:
            raise _Failed(f"is no URL ({error})") from None
        if parts.scheme not in PORTS:
            raise _Failed(f"has scheme {parts.scheme!r}; allowed: https, http, data")
        if parts.username is not None or parts.password is not None:
            raise _Failed("has a user's name; allowed: none")
        if not host or (port is not None and port != PORTS[parts.scheme]):
            raise _Failed(f"has host {host!r} and port {port}; allowed: a host, port {PORTS[parts.scheme]}")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if not path.isascii():
            raise _Failed("has letters that are not encoded; allowed: percent-encoding")
        return cls(parts.scheme, host.lower(), PORTS[parts.scheme], path)


@dataclass
class ImageFetcher:
    """Of one process. domains: allowed hosts; `*.example.org` stands for all below it, `*` for all."""

    domains: Sequence[str]
    resolve: Resolve = resolve_addresses
    are_public: Callable[[str], bool] = is_public
    tls: ssl.SSLContext = field(default_factory=ssl.create_default_context)
    ports: dict[str, int] = field(default_factory=dict)  # instead of those of the schemes, for tests
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_AT_ONCE))
    _running: dict[str, asyncio.Task[bytes]] = field(default_factory=dict)

    async def fetch_all(self, urls: Sequence[tuple[str, str]]) -> list[bytes]:
        """The bytes behind (name, URL), some at a time. Raises InvalidRequestError, with a name."""
        room = asyncio.Semaphore(_MAX_OF_REQUEST)

        async def one(name: str, url: str) -> bytes:
            async with room:
                return await self.fetch(url, name)

        names = {url: name for name, url in reversed(urls)}
        data = await asyncio.gather(*(one(name, url) for url, name in names.items()))
        found = dict(zip(names, data, strict=True))
        return [found[url] for _, url in urls]

    async def fetch(self, url: str, name: str) -> bytes:
        """Equal URLs at the same time are fetched once. Raises InvalidRequestError, with `name` for the URL."""
        task = self._running.get(url)
        if task is None:
            task = self._running[url] = asyncio.create_task(self._bounded(url))
            task.add_done_callback(lambda _: self._running.pop(url, None))
        try:
            return await asyncio.shield(task)
        except _Failed as error:
            raise InvalidRequestError(f"{name} {error}") from None

    async def _bounded(self, url: str) -> bytes:
        try:
            return await asyncio.wait_for(self._follow(url), _TOTAL_SECONDS)
        except asyncio.TimeoutError:
            raise _Failed(f"was not read in {_TOTAL_SECONDS:g} seconds") from None
        except (OSError, ssl.SSLError, EOFError, ValueError) as error:
            raise _Failed(f"cannot be read ({type(error).__name__})") from None

    async def _follow(self, url: str) -> bytes:
        """Raises _Failed, OSError, EOFError, ValueError."""
        target = Target.of(url)
        for _ in range(_MAX_REDIRECTS + 1):
            self._check(target)
            async with self._room:
                answer = await self._ask(target)
            if isinstance(answer, bytes):
                return answer
            found = Target.of(urljoin(f"{target.scheme}://{target.host}{target.path}", answer))
            if (target.scheme, found.scheme) == ("https", "http"):
                raise _Failed("leads from https to http; allowed: https")
            target = found
        raise _Failed(f"leads on more than {_MAX_REDIRECTS} times")

    def _check(self, target: Target) -> None:
        for domain in self.domains:
            below = domain.removeprefix("*")
            if domain in (ANY, target.host) or (below != domain and target.host.endswith(below)):
                return
        raise _Failed(f"has host {target.host!r}; allowed: {', '.join(self.domains)}")

    async def _ask(self, target: Target) -> bytes | str:
        """The body, or the place that the answer leads to."""
        port = self.ports.get(target.scheme, target.port)
        addresses = await self.resolve(target.host, port)
        if not addresses or not all(map(self.are_public, addresses)):
            raise _Failed(f"has host {target.host!r}, which has no public address, or others too; allowed: public ones")
        tls, name = (self.tls, target.host) if target.scheme == "https" else (None, None)
        connecting = asyncio.open_connection(addresses[0], port, limit=_MAX_HEAD, ssl=tls, server_hostname=name)
        reader, writer = await asyncio.wait_for(connecting, _CONNECT_SECONDS)
        try:
            host = f"[{target.host}]" if ":" in target.host else target.host
            lines = (f"GET {target.path} HTTP/1.1", f"Host: {host}", "Accept: image/*", "Accept-Encoding: identity")
            writer.write("\r\n".join((*lines, "User-Agent: minisgl", "Connection: close", "", "")).encode("ascii"))
            await writer.drain()
            return await _answer(reader)
        finally:
            writer.transport.abort()


async def _answer(reader: asyncio.StreamReader) -> bytes | str:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError:
        raise _Failed(f"has a head of more than {_MAX_HEAD} bytes") from None
    first, *lines = head.split("\r\n")
    status = int(first.split(" ", 2)[1]) if first.startswith("HTTP/1.") else 0
    headers = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines if line)}
    if status in _REDIRECTS and headers.get("location"):
        return headers["location"]
    if status != 200:
        raise _Failed(f"answers with status {status}; allowed: 200")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise _Failed("is compressed by its server; allowed: as it is")
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return await _chunks(reader)
    length = headers.get("content-length")
    if length is None:
        return await _until_end(reader)
    if not length.isascii() or not length.isdecimal() or len(length) > 18:
        raise _Failed("has no valid Content-Length")
    if int(length) > MAX_FILE_BYTES:
        raise _Failed(f"has {length} bytes; allowed: {MAX_FILE_BYTES}")
    return await reader.readexactly(int(length))


async def _until_end(reader: asyncio.StreamReader) -> bytes:
    data = bytearray()
    while piece := await reader.read(1 << 16):
        data += piece
        _check_size(len(data))
    return bytes(data)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    data = bytearray()
    while size := int((await reader.readline()).partition(b";")[0], 16):
        _check_size(len(data) + abs(size))
        data += await reader.readexactly(size)
        if await reader.readexactly(2) != b"\r\n":
            raise ValueError("a chunk is longer than it says")
    return bytes(data)


def _check_size(size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise _Failed(f"has more than {MAX_FILE_BYTES} bytes; allowed: {MAX_FILE_BYTES}")
