"""The pixels of a front's requests: taken from the tokenizer, removed when the request has ended."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Hashable, Sequence

import msgspec

from minisgl_backend.errors import CapacityError, InvalidRequestError
from minisgl_backend.images.segments import SegmentFolder, remove_segment
from minisgl_backend.request import Content

MAX_BYTES = 8 << 30  # of all requests of a front together


class TakenImages:
    """Thread-safe. A front without images has no folder."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: SegmentFolder | None = None
        self._names: dict[Hashable, tuple[list[str], int]] = {}  # by request, with their bytes
        self._num_bytes = 0

    def take(self, request: Hashable, contents: Sequence[Content]) -> tuple[Content, ...]:
        """The contents with the front's own names of their pixels, until `remove`. Raises InvalidRequestError for what
        is no content of this machine's tokenizer, CapacityError if too many bytes wait; nothing is taken then."""
        size = sum(math.prod(content.shape) for content in contents)
        try:
            with self._lock:
                if self._num_bytes + size > MAX_BYTES:
                    raise CapacityError(
                        f"{self._num_bytes} bytes of images wait; allowed: {MAX_BYTES}; try again later"
                    )
                self._num_bytes += size
                if self._folder is None:
                    self._folder = SegmentFolder()
                folder = self._folder
                names: list[str] = []
                self._names[request] = names, size
            for content in contents:
                names.append(folder.take(content.pixels))
        except (ValueError, OSError) as error:
            self.remove(request)
            raise InvalidRequestError(f"spec.contents have no pixels on this machine ({error})") from None
        finally:
            discard(contents)
        return tuple(
            msgspec.structs.replace(content, pixels=name) for content, name in zip(contents, names, strict=True)
        )

    def remove(self, request: Hashable) -> None:
        """Of a request that has ended; nothing happens without images."""
        with self._lock:
            names, size = self._names.pop(request, ([], 0))
            self._num_bytes -= size
        for name in names:
            remove_segment(name)

    def close(self) -> None:
        """Removes all of them."""
        with self._lock:
            if self._folder is not None:
                self._folder.close()


def discard(contents: Sequence[Content]) -> None:
    """Removes the tokenizer's names of what was not taken."""
    for content in contents:
        with contextlib.suppress(ValueError, OSError):
            remove_segment(content.pixels)
