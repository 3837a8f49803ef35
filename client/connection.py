"""Selects server and protocol: an optional URL -> an address."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

Protocol = Literal["grpc", "http"]

_DEFAULT_PORTS: dict[str, int] = {"grpc": 8001, "http": 8000}
_SCHEMES: dict[str, tuple[Protocol, bool]] = {
    "grpc": ("grpc", False),
    "grpcs": ("grpc", True),
    "http": ("http", False),
    "https": ("http", True),
}


@dataclass(frozen=True)
class Address:
    """Address of a server."""

    protocol: Protocol
    host: str
    port: int
    secure: bool  # TLS

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


URL_VARIABLE, METRICS_VARIABLE = "MINISGL_URL", "MINISGL_METRICS_URL"
"""Environment variables: the server where none is named, and its metrics where these are not named."""


def parse_url(url: str | None, protocol: Protocol | None, environment: Mapping[str, str] = os.environ) -> Address:
    """`[SCHEME://]HOST[:PORT]`; the scheme (grpc, grpcs, http, https) may replace `protocol`, whose default is grpc.

    None: the value of MINISGL_URL, otherwise 127.0.0.1. Raises ValueError for an invalid URL or protocol.
    """
    if protocol is not None and protocol not in get_args(Protocol):
        raise ValueError(f"protocol is {protocol!r}; allowed: grpc, http")
    name = "url" if url else URL_VARIABLE
    url = url or environment.get(URL_VARIABLE) or None
    scheme, _, rest = (url or "127.0.0.1").rpartition("://")
    if scheme and scheme not in _SCHEMES:
        raise ValueError(f"{name} is {url!r}; allowed schemes: {', '.join(_SCHEMES)}")
    named, secure = _SCHEMES[scheme] if scheme else (protocol or "grpc", False)
    if protocol is not None and named != protocol:
        raise ValueError(f"{name} is {url!r} but protocol is {protocol!r}; leave one of them out")
    allowed = "HOST:PORT, with a scheme before it or not"
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{name} is {url!r} ({error}); allowed: {allowed}") from None
    if not host or parts.path.strip("/"):
        raise ValueError(f"{name} is {url!r}; allowed: {allowed}")
    return Address(named, host, port or _DEFAULT_PORTS[named], secure)
