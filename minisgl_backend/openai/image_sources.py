"""Images that requests name by data URLs, by addresses and by uploaded files: their bytes, read off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from minisgl_backend.errors import CapacityError, InvalidRequestError
from minisgl_backend.images.fetch import ImageFetcher
from minisgl_backend.images.loading import is_on_the_web
from minisgl_backend.images.parts import MAX_FILE_BYTES, Source, check_number, loaded
from minisgl_backend.openai.batches.files import FileStore
from minisgl_backend.openai.errors import ApiError, invalid
from minisgl_backend.openai.image_errors import image_code
from minisgl_backend.openai.storage import storage_error

_MAX_BYTES = 64 << 20  # of a request's images by URL and file: as a body with images may have
_MAX_AT_ONCE = 16  # requests whose images are read


class ImageSources:
    """Of one endpoint."""

    def __init__(self, files: FileStore | None, media_domains: Sequence[str]) -> None:
        """files: where uploads are kept; media_domains: hosts from which images are fetched; none: no URL is."""
        self._files = files
        self._fetcher = ImageFetcher(media_domains) if media_domains else None
        self._room = asyncio.Semaphore(_MAX_AT_ONCE)

    async def load(self, sources: Sequence[Source], max_images: int | None = None) -> list[Source]:
        """The same with their data. max_images: of a request; 0: the model has no eyes and will say so, so nothing is
        read; None: not known. Raises ApiError for the first that cannot be had."""
        if max_images == 0:
            return [replace(one, url="", file_id="") for one in sources]
        try:
            if max_images is not None:
                check_number(sources, max_images)
            if all(one.url[:5].lower() == "data:" for one in sources):
                return [await asyncio.to_thread(loaded, one) for one in sources]
            async with self._room:
                return await self._read(sources)
        except CapacityError as error:
            raise ApiError(429, str(error), code="queue_full") from None
        except InvalidRequestError as error:
            message = str(error)
            raise invalid(message.partition(" ")[0].partition("[")[0], message, image_code(message)) from None

    async def _read(self, sources: Sequence[Source]) -> list[Source]:
        found = list(sources)
        web = [number for number, one in enumerate(sources) if is_on_the_web(one)]
        if self._fetcher is not None and web:
            urls = [(sources[number].name, sources[number].url.strip()) for number in web]
            for number, data in zip(web, await self._fetcher.fetch_all(urls, _MAX_BYTES), strict=True):
                found[number] = replace(sources[number], data=data, url="")
        total = 0
        for number, one in enumerate(found):
            found[number] = await (self._of_file(one) if one.file_id else asyncio.to_thread(loaded, one))
            total += len(found[number].data)
            if total > _MAX_BYTES:
                raise InvalidRequestError(
                    f"{one.name} brings the request's images to {total} bytes; allowed: {_MAX_BYTES}"
                )
        return found

    async def _of_file(self, source: Source) -> Source:
        try:
            found = None if self._files is None else await asyncio.to_thread(self._files.find, source.file_id)
            if self._files is None or found is None:
                raise FileNotFoundError
            if found["bytes"] > MAX_FILE_BYTES:
                raise InvalidRequestError(f"{source.name} has {found['bytes']} bytes; allowed: {MAX_FILE_BYTES}")
            data = await asyncio.to_thread(self._files.data(source.file_id).read_bytes)
        except FileNotFoundError:
            raise InvalidRequestError(f"{source.name} is {source.file_id!r:.100}, which is no file here") from None
        except OSError as error:
            raise storage_error("files cannot be read", error) from None
        return replace(source, data=data, file_id="")
