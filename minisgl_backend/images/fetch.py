"""Images by URL, for servers that may fetch them: the only code here that opens connections to addresses of clients.

Off unless domains are allowed. A name is resolved once, every address that it has must be a public one, and the
connection goes to the address that was checked, so that no second answer of a resolver counts. Redirects are URLs like
the first one. Bytes are counted, whatever a header says, and all times are bounded (OWASP's page on server-side request
forgery lists what this is about).
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urljoin, urlsplit

from minisgl_backend.errors import CapacityError, InvalidRequestError
from minisgl_backend.images.parts import MAX_FILE_BYTES

PORTS = {"http": 80, "https": 443}
ANY = "*"  # as a domain: all public hosts
_MAX_REDIRECTS, _MAX_URL, _MAX_HEAD, _MAX_CHUNKS = 3, 8192, 32 << 10, 1 << 15
_CONNECT_SECONDS, _TOTAL_SECONDS, _ROOM_SECONDS = 3.0, 10.0, 20.0
_MAX_AT_ONCE, _MAX_OF_REQUEST = 64, 8
_REDIRECTS = (301, 302, 303, 307, 308)
_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:.]*:[0-9a-f:.]*")
# What Python's versions differ about, and addresses of clouds' own services that look public.
_NEVER = tuple(
    ipaddress.ip_network(one)
    for one in (
        "192.0.0.0/24",
        "192.88.99.0/24",
        "168.63.129.16/32",
        "2001::/23",
        "2001:db8::/32",
        "2002::/16",
        "3fff::/20",
    )
)
_UNICAST, _NAT64 = ipaddress.ip_network("2000::/3"), ipaddress.ip_network("64:ff9b::/96")

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]  # host, port -> addresses


class _Failed(Exception):
    """Why a URL gave no bytes."""


class Resolver:
    """The system's, in threads of its own: names that nobody answers for hold up nothing else."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_MAX_AT_ONCE, "resolve")

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """Raises OSError."""
        ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        return list(dict.fromkeys(str(one[4][0]) for one in found))


def is_public(address: str) -> bool:
    """Whether an IP address, or the IPv4 address that one of version 6 stands for, is reachable from everywhere. A
    site's own NAT64 prefix among public addresses cannot be known here."""
    try:
        one = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(one, ipaddress.IPv6Address):
        inner = one.ipv4_mapped or (ipaddress.IPv4Address(int(one) & 0xFFFFFFFF) if one in _NAT64 else None)
        if inner is not None:
            return is_public(str(inner))
        if one not in _UNICAST:
            return False
    return one.is_global and not one.is_multicast and not any(one in network for network in _NEVER)


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
            host = (host if host.isascii() else host.encode("idna").decode("ascii")).rstrip(".").lower()
        except ValueError as error:
            raise _Failed(f"is no URL ({error})") from None
        if parts.scheme not in PORTS:
            raise _Failed(f"has scheme {parts.scheme!r}; allowed: https, http")
        if parts.username is not None or parts.password is not None:
            raise _Failed("has a user's name; allowed: none")
        if not _HOST.fullmatch(host) or (port is not None and port != PORTS[parts.scheme]):
            raise _Failed(f"has host {host!r} and port {port}; allowed: a host, port {PORTS[parts.scheme]}")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if not path.isascii():
            raise _Failed("has letters that are not encoded; allowed: percent-encoding")
        return cls(parts.scheme, host, PORTS[parts.scheme], path)

    @property
    def authority(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


@dataclass
class _Running:
    """A fetch, and how many wait for it."""

    task: asyncio.Future[bytes]
    waiters: int = 0


@dataclass
class ImageFetcher:
    """Of one process. domains: allowed hosts; `*.example.org` stands for all below it, `*` for all."""

    domains: Sequence[str]
    resolve: Resolve = field(default_factory=Resolver)
    are_public: Callable[[str], bool] = is_public
    tls: ssl.SSLContext = field(default_factory=ssl.create_default_context)
    ports: dict[str, int] = field(default_factory=dict)  # instead of those of the schemes, for tests
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_AT_ONCE))
    _running: dict[str, _Running] = field(default_factory=dict)

    async def fetch_all(self, urls: Sequence[tuple[str, str]], max_bytes: int) -> list[bytes]:
        """The bytes behind (name, URL), some at a time; with the first that fails all end. max_bytes: of all, equal
        URLs counted each. Raises InvalidRequestError, with a name, and CapacityError."""
        room, total = asyncio.Semaphore(_MAX_OF_REQUEST), 0
        names = {url: name for name, url in reversed(urls)}
        times = {url: sum(url == one for _, one in urls) for url in names}

        async def one(name: str, url: str) -> bytes:
            nonlocal total
            async with room:
                data = await self.fetch(url, name)
            total += len(data) * times[url]
            if total > max_bytes:
                raise InvalidRequestError(f"{name} brings the request's images to {total} bytes; allowed: {max_bytes}")
            return data

        tasks = [asyncio.ensure_future(one(name, url)) for url, name in names.items()]
        try:
            found = dict(zip(names, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()
        return [found[url] for _, url in urls]

    async def fetch(self, url: str, name: str) -> bytes:
        """Equal URLs at the same time are fetched once, as long as somebody waits. Raises InvalidRequestError, with
        `name` for the URL, and CapacityError."""
        running = self._running.get(url)
        if running is None:
            running = self._running[url] = _Running(asyncio.ensure_future(self._in_room(url)))
            running.task.add_done_callback(partial(self._ended, url, running))
        running.waiters += 1
        try:
            return await asyncio.shield(running.task)
        except _Failed as error:
            raise InvalidRequestError(f"{name} {error}") from None
        finally:
            running.waiters -= 1
            if not running.waiters and not running.task.done():
                self._forget(url, running)  # first: who comes now must not wait for what ends
                running.task.cancel()

    def _forget(self, url: str, running: _Running) -> None:
        if self._running.get(url) is running:
            del self._running[url]

    def _ended(self, url: str, running: _Running, task: asyncio.Future[bytes]) -> None:
        self._forget(url, running)
        if not task.cancelled():
            task.exception()  # told to those who wait, if any does

    async def _in_room(self, url: str) -> bytes:
        """Raises _Failed, CapacityError."""
        try:
            await asyncio.wait_for(self._room.acquire(), _ROOM_SECONDS)
        except asyncio.TimeoutError:
            raise CapacityError(f"{_MAX_AT_ONCE} images are being fetched, all at a time; try again later") from None
        try:
            return await asyncio.wait_for(self._follow(url), _TOTAL_SECONDS)
        except asyncio.TimeoutError:
            raise _Failed(f"was not read in {_TOTAL_SECONDS:g} seconds") from None
        except _Failed:
            raise
        except Exception as error:  # of the system, of TLS, of uvloop, of what a server wrote
            raise _Failed(f"cannot be read ({type(error).__name__})") from None
        finally:
            self._room.release()

    async def _follow(self, url: str) -> bytes:
        target = Target.of(url)
        for _ in range(_MAX_REDIRECTS + 1):
            self._check(target)
            answer = await self._ask(target)
            if isinstance(answer, bytes):
                return answer
            found = Target.of(urljoin(f"{target.scheme}://{target.authority}{target.path}", answer))
            if (target.scheme, found.scheme) == ("https", "http"):
                raise _Failed("leads from https to http; allowed: https")
            target = found
        raise _Failed(f"leads on more than {_MAX_REDIRECTS} times")

    def _check(self, target: Target) -> None:
        for domain in self.domains:
            below = domain.removeprefix("*")
            if domain in (ANY, target.host) or (below != domain and target.host.endswith(below)):
                return
        raise _Failed(f"has host {target.host!r}; allowed: those of --allowed-media-domains")

    async def _ask(self, target: Target) -> bytes | str:
        """The body, or the place that the answer leads to."""
        port = self.ports.get(target.scheme, target.port)
        try:
            addresses = await self.resolve(target.host, port)
        except OSError:  # told as a name that is private: what exists inside is nobody's business
            addresses = ()
        if not addresses or not all(map(self.are_public, addresses)):
            raise _Failed(f"has host {target.host!r}, which has no public address, or others too; allowed: public ones")
        reader, writer = await self._connected(target, addresses, port)
        try:
            lines = (
                *(f"GET {target.path} HTTP/1.1", f"Host: {target.authority}", "Accept: image/*"),
                *("Accept-Encoding: identity", "User-Agent: minisgl", "Connection: close", "", ""),
            )
            writer.write("\r\n".join(lines).encode("ascii"))
            await writer.drain()
            return await _answer(reader, target.host)
        finally:
            writer.transport.abort()

    async def _connected(
        self, target: Target, addresses: Sequence[str], port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """To the first address that answers. Raises OSError, _Failed."""
        tls, name = (self.tls, target.host) if target.scheme == "https" else (None, None)
        failed: Exception = OSError()
        for address in addresses:
            # Not `wait_for`: before Python 3.12 it may lose that it was cancelled.
            task = asyncio.ensure_future(
                asyncio.open_connection(address, port, limit=_MAX_HEAD, ssl=tls, server_hostname=name)
            )
            try:
                await asyncio.wait({task}, timeout=_CONNECT_SECONDS)
            finally:
                if not task.done():
                    task.cancel()
                    task.add_done_callback(_drop)
            if not task.done():
                failed = _Failed(f"was not connected to in {_CONNECT_SECONDS:g} seconds")
            elif (error := task.exception()) is None:
                return task.result()
            elif isinstance(error, Exception):
                failed = error
        raise failed


def _drop(task: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    """A connection that nobody waits for any more."""
    if not task.cancelled() and task.exception() is None:
        task.result()[1].transport.abort()


async def _answer(reader: asyncio.StreamReader, host: str) -> bytes | str:
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
        raise _Failed(f"has host {host!r}, which answers with status {status}; allowed: 200")
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
    for number in range(_MAX_CHUNKS):
        size = int((await reader.readline()).partition(b";")[0], 16)
        if not size:
            return bytes(data)
        _check_size(len(data) + abs(size))
        data += await reader.readexactly(size)
        if await reader.readexactly(2) != b"\r\n":
            raise ValueError("a chunk is longer than it says")
        if number % 64 == 63:
            await asyncio.sleep(0)  # what is there already is read without waiting
    raise _Failed(f"comes in more than {_MAX_CHUNKS} chunks")


def _check_size(size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise _Failed(f"has more than {MAX_FILE_BYTES} bytes; allowed: {MAX_FILE_BYTES}")
