"""The bytes of images that stand behind URLs, for callers that wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from minisgl_backend.images.parts import Source, loaded

if TYPE_CHECKING:
    from minisgl_backend.images.fetch import ImageFetcher

WEB = ("http:", "https:")
MAX_BYTES = 64 << 20  # of a request's images by URL


def is_on_the_web(source: Source) -> bool:
    return source.url.lstrip()[:6].lower().startswith(WEB)


class SourceLoader:
    """Of one process. Thread-safe; its own thread, where all is fetched, begins with the first URL."""

    def __init__(self, domains: Sequence[str]) -> None:
        """domains: hosts that images are fetched from, as `ImageFetcher` has them; none: no URL is."""
        self._domains = domains
        self._lock = threading.Lock()

    def load(self, sources: Sequence[Source]) -> list[Source]:
        """The same with their data. Raises InvalidRequestError, CapacityError."""
        found = list(sources)
        web = [number for number, one in enumerate(found) if is_on_the_web(one)] if self._domains else []
        if web:
            urls = [(found[number].name, found[number].url.strip()) for number in web]
            with self._lock:
                loop, fetcher = self._loop, self._fetcher
            asked = asyncio.run_coroutine_threadsafe(fetcher.fetch_all(urls, MAX_BYTES), loop)
            for number, data in zip(web, asked.result(), strict=True):
                found[number] = replace(found[number], data=data, url="")
        return [loaded(one) for one in found]

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
