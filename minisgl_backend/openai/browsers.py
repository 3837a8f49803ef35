"""Which browsers may send requests: a page of another origin may not act in the name of whoever looks at it.

A local server without a key trusts whatever reaches its port, and so does every browser on that machine, for any page
that it shows. Two ways are closed: a cross-site request that changes something (CSRF), told by `Sec-Fetch-Site` or
`Origin`, which browsers set and pages cannot; and a name of somebody else's that resolves to the loopback address (DNS
rebinding), told by `Host`. Programs send neither header, and are let through.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl_backend.host.addresses import is_loopback
from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.in_process import INSIDE
from minisgl_backend.openai.limits import refuse

_READS = ("GET", "HEAD", "OPTIONS")
_OWN_SITES = ("same-origin", "none")  # none: typed into the address bar, or a bookmark


class BrowserGuard:
    """Responds 403 to requests of pages that have no business here."""

    def __init__(self, app: ASGIApp, host: str, allowed_hosts: Sequence[str], allowed_origins: Sequence[str]) -> None:
        """`host`: the address that the endpoint listens on; `allowed_hosts`: further names in `Host`, without ports."""
        self._app = app
        self._checks_host = "*" not in allowed_hosts and (bool(allowed_hosts) or is_loopback(host))
        self._hosts = frozenset(name.lower() for name in allowed_hosts)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get(INSIDE):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        error = self._host_error(headers)
        if error is None and scope["method"] not in _READS:
            error = self._origin_error(headers)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await refuse(error, scope, receive, send, close=True)

    def _host_error(self, headers: Headers) -> ApiError | None:
        given = headers.get("host")
        if given is None or not self._checks_host:
            return None
        name = _name_of(given)
        if is_loopback(name) or name in self._hosts:
            return None
        allowed = ", ".join(["localhost", "loopback addresses", *sorted(self._hosts)])
        message = f"Host is {given[:200]!r}; allowed: {allowed}. A proxy's name is allowed by --allowed-hosts"
        return ApiError(403, message, code="host_not_allowed")

    def _origin_error(self, headers: Headers) -> ApiError | None:
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if "*" in self._origins or (origin is not None and origin.lower() in self._origins):
            return None
        if site is not None:
            if site in _OWN_SITES:
                return None
        elif origin is None or _authority(origin) == headers.get("host", "").lower():
            return None
        who = f"Origin is {origin[:200]!r}" if origin is not None else f"Sec-Fetch-Site is {site!r}"
        return ApiError(
            403, f"{who}; allowed: this server's own page, and --allowed-origins", code="origin_not_allowed"
        )


def _name_of(host: str) -> str:
    """The name or address of a `Host` header, in lower case, without port, brackets or a last dot."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin.lower()).netloc
    except ValueError:
        return ""
