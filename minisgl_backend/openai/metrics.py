"""Passes on the server's own metrics: one page to scrape, the same for any number of workers."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import urllib.error
import urllib.request

from minisgl_backend.openai.errors import ApiError

log = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 5.0
_FRESH_SECONDS = 0.2  # the server's values change no faster
_DOWN = re.compile(r"^minisgl_engine_up(?:\{[^}]*\})? 0(?:\.0*)?$", re.MULTILINE)


class ServerMetrics:
    """Fetches the metrics, at most a few times a second for all callers."""

    def __init__(self, address: str) -> None:
        """`address`: HOST:PORT; "": there are none."""
        self._address = address
        self._text = ""
        self._fetched_at = 0.0
        self._lock = asyncio.Lock()
        self._is_told = False  # that there are none

    async def text(self) -> str:
        """Raises ApiError if the server does not answer, or has no metrics."""
        if not self._address:
            raise ApiError(404, "this endpoint does not know where the server's metrics are")
        async with self._lock:
            if time.monotonic() - self._fetched_at > _FRESH_SECONDS:
                self._text = await asyncio.to_thread(self._fetch)
                self._fetched_at = time.monotonic()
            return self._text

    async def engine_is_down(self) -> bool:
        """True if the server's metrics say so; they may be out of reach while the server answers."""
        if not self._address:
            return False
        try:
            text = await self.text()
        except ApiError:
            if not self._is_told:
                self._is_told = True
                log.warning("/health cannot tell if the engine is down: no metrics at %s (--metrics)", self._address)
            return False
        return _DOWN.search(text) is not None

    def _fetch(self) -> str:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{self._address}/metrics", timeout=_TIMEOUT_SECONDS) as reply:
                return str(reply.read().decode("utf-8", "replace"))
        except (urllib.error.URLError, OSError):
            raise ApiError(503, "the server's metrics cannot be reached", code="unavailable") from None
