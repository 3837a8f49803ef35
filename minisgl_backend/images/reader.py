"""The images of requests: measured by their headers, then decoded into shared memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from minisgl_backend.errors import CapacityError, InvalidRequestError
from minisgl_backend.images.digest import image_digest
from minisgl_backend.images.family import Family
from minisgl_backend.images.parts import MAX_FILE_BYTES, Source, check_number
from minisgl_backend.images.pool import Pool, Worker, default_workers
from minisgl_backend.images.sizes import Size
from minisgl_backend.images.store import ImageStore
from minisgl_backend.images.tasks import Answer, Decode, Open

MAX_DECODED_BYTES = 512 << 20  # of a request, as RGB before resizing


@dataclass(frozen=True)
class ImageLimits:
    """Of one request."""

    num_images: int = 20
    file_bytes: int = MAX_FILE_BYTES


@dataclass(frozen=True)
class Measured:
    """An image whose header was read."""

    source: Source
    digest: bytes
    upright: tuple[int, int]  # width and height, as it is to be seen
    size: Size
    family: Family  # with the source's options

    @property
    def resample(self) -> int:
        return self.family.resample


class ImageReader:
    """Of one model's front. Thread-safe; its processes and shared memory begin with the first image."""

    def __init__(
        self,
        family: Family,
        *,
        limits: ImageLimits | None = None,
        num_workers: int | None = None,
        cache_bytes: int = 1 << 30,
    ) -> None:
        self.family = family
        self.limits = limits or ImageLimits()
        self._pool = Pool(num_workers or default_workers())
        self._cache_bytes = cache_bytes
        self._store: ImageStore | None = None

    def close(self) -> None:
        """Ends the processes and removes the shared memory. Safe to call twice."""
        self._pool.close()
        if self._store is not None:
            self._store.close()

    def measure(self, sources: Sequence[Source]) -> list[Measured]:
        """Reads headers alone. Raises InvalidRequestError naming the part, CapacityError."""
        check_number(sources, self.limits.num_images)
        families = [self._family(source) for source in sources]
        futures = [self._pool.submit(_opening(source)) for source in sources]
        found, decoded = [], 0
        for source, family, future in zip(sources, families, futures, strict=True):
            with _named(source):
                answer = _checked(future.result())
                decoded += answer.width * answer.height * 3
                if decoded > MAX_DECODED_BYTES:
                    raise InvalidRequestError(
                        f"brings the request's images to {decoded} bytes when decoded; allowed: {MAX_DECODED_BYTES}"
                    )
                size = family.size(answer.width, answer.height)
                found.append(Measured(source, _digest(source, family), (answer.width, answer.height), size, family))
        return found

    def _family(self, source: Source) -> Family:
        """Checks the source, too."""
        with _named(source):
            if source.raw is None and len(source.data) > self.limits.file_bytes:
                raise InvalidRequestError(f"has {len(source.data)} bytes; allowed: {self.limits.file_bytes}")
        family = self.family.low_detail() if source.low_detail else self.family
        return family.changed(source.options)

    def decode(self, images: Sequence[Measured]) -> list[str]:
        """The names of the segments with the images' pixels, each for one request. Raises as `measure`; nothing is
        left lent then."""
        if self._store is None:
            self._store = ImageStore(self._cache_bytes)
        store = self._store
        futures: list[Future[str]] = []
        try:
            futures += [self._pool.submit(_decoding(store, image)) for image in images]
            names = []
            for image, future in zip(images, futures, strict=True):
                with _named(image.source):
                    names.append(future.result())
            return names
        except BaseException:
            for future in futures:
                future.cancel()
                future.add_done_callback(lambda done: _return(store, done))
            raise

    def give_back(self, names: Sequence[str]) -> None:
        """Of a request that ends before its images go on."""
        for name in names:
            if self._store is not None:
                self._store.give_back(name)


def _return(store: ImageStore, future: Future[str]) -> None:
    if not future.cancelled() and future.exception() is None:
        store.give_back(future.result())


def _digest(source: Source, family: Family) -> bytes:
    return image_digest(
        source.data,
        family=family.fingerprint,
        background=source.background,
        raw=source.raw,
        turn=source.turn,
        salt=source.salt,
    )


def _opening(source: Source) -> Any:
    def opened(worker: Worker) -> Answer:
        return worker.open(Open(raw=source.raw, turn=source.turn), source.data)

    return opened


def _decoding(store: ImageStore, image: Measured) -> Any:
    source, size = image.source, image.size

    def decoded(worker: Worker) -> str:
        def write(path: str) -> None:
            _checked(worker.open(Open(raw=source.raw, turn=source.turn), source.data))
            task = Decode(
                path=path, views=size.views, shape=size.shape, resample=image.resample, background=source.background
            )
            _checked(worker.decode(task))

        return store.lend(image.digest, size.num_bytes, write)

    return decoded


def _checked(answer: Answer) -> Answer:
    if answer.full:
        raise CapacityError("shared memory (/dev/shm) has no room for the request's images; try again later")
    if answer.refused:
        raise InvalidRequestError(answer.refused)
    return answer


@contextlib.contextmanager
def _named(source: Source) -> Any:
    """Puts the part's name before what is wrong with it."""
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{source.name} {error}") from None
