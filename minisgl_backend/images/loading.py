"""The bytes of images that stand behind URLs, for callers that wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from minisgl_backend.errors import CapacityError
from minisgl_backend.images.parts import Source, loaded

if TYPE_CHECKING:
    from minisgl_backend.images.fetch import ImageFetcher

WEB = ("http:", "https:")
MAX_BYTES = 64 << 20  # of a request's images by URL
MAX_FETCHING = 32  # requests that wait for their URLs: each holds a thread of its caller's


def is_on_the_web(source: Source) -> bool:
    return source.url.lstrip()[:6].lower().startswith(WEB)


class SourceLoader:
    """Of one process. Thread-safe; its own thread, where all is fetched, begins with the first URL."""

    def __init__(self, domains: Sequence[str]) -> None:
        """domains: hosts that images are fetched from, as `ImageFetcher` has them; none: no URL is."""
        self._domains = domains
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(MAX_FETCHING)

    @property
    def max_fetching(self) -> int:
        """Calls of `load` that wait for URLs at a time."""
        return MAX_FETCHING if self._domains else 0

    def load(self, sources: Sequence[Source]) -> list[Source]:
        """The same with their data; waits for URLs alone. Raises InvalidRequestError, CapacityError."""
        found = list(sources)
        web = [number for number, one in enumerate(found) if is_on_the_web(one)] if self._domains else []
        if web:
            urls = [(found[number].name, found[number].url.strip()) for number in web]
            for number, data in zip(web, self._fetched(urls), strict=True):
                found[number] = replace(found[number], data=data, url="")
        return [loaded(one) for one in found]

    def _fetched(self, urls: Sequence[tuple[str, str]]) -> list[bytes]:
        if not self._room.acquire(blocking=False):
            raise CapacityError(
                f"{urls[0][0]} is a URL, and {MAX_FETCHING} requests wait for theirs, all at a time; try again later"
            )
        try:
            with self._lock:
                loop, fetcher = self._loop, self._fetcher
            return asyncio.run_coroutine_threadsafe(fetcher.fetch_all(urls, MAX_BYTES), loop).result()
        finally:
            self._room.release()

    def close(self) -> None:
        """Safe to call twice."""
        with self._lock:
            if "_loop" in self.__dict__:
                self._loop.call_soon_threadsafe(self._loop.stop)

    @cached_property
    def _fetcher(self) -> ImageFetcher:
        from minisgl_backend.images.fetch import ImageFetcher

        return ImageFetcher(self._domains)

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="fetch-images", daemon=True).start()
        return loop
