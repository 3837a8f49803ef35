"""Images that requests name by data URLs, by addresses and by uploaded files: their bytes, read off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.images.fetch import ImageFetcher
from minisgl_backend.images.parts import MAX_FILE_BYTES, Source, loaded
from minisgl_backend.openai.batches.files import FileStore
from minisgl_backend.openai.errors import invalid

_WEB = ("http:", "https:")


class ImageSources:
    """Of one endpoint."""

    def __init__(self, files: FileStore, media_domains: Sequence[str]) -> None:
        """media_domains: hosts from which images are fetched; none: no URL is."""
        self._files = files
        self._fetcher = ImageFetcher(media_domains) if media_domains else None

    async def load(self, sources: Sequence[Source]) -> list[Source]:
        """The same with their data. Raises ApiError for the first that cannot be had."""
        web = [one for one in sources if self._fetcher is not None and one.url.lstrip()[:6].lower().startswith(_WEB)]
        try:
            fetched = {}
            if self._fetcher is not None and web:
                data = await self._fetcher.fetch_all([(one.name, one.url.strip()) for one in web])
                fetched = {one.name: each for one, each in zip(web, data, strict=True)}
            return [
                replace(one, data=fetched[one.name], url="") if one.name in fetched else await self._read(one)
                for one in sources
            ]
        except InvalidRequestError as error:
            raise invalid(str(error).partition(" ")[0].partition("[")[0], str(error)) from None

    async def _read(self, source: Source) -> Source:
        if not source.file_id:
            return await asyncio.to_thread(loaded, source)
        try:
            found = await asyncio.to_thread(self._files.find, source.file_id)
            if found is None:
                raise FileNotFoundError
            if found["bytes"] > MAX_FILE_BYTES:
                raise InvalidRequestError(f"{source.name} has {found['bytes']} bytes; allowed: {MAX_FILE_BYTES}")
            data = await asyncio.to_thread(self._files.data(source.file_id).read_bytes)
        except OSError:
            raise InvalidRequestError(f"{source.name} is {source.file_id!r:.100}, which is no file here") from None
        return replace(source, data=data, file_id="")
