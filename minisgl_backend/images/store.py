"""The pixels of a front: kept by digest up to a number of bytes, and lent to requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from minisgl_backend.errors import CapacityError
from minisgl_backend.images.segments import SegmentFolder, open_pixels, remove_segment

__all__ = ["ImageStore", "open_pixels"]

_FORGOTTEN_S = 120.0  # a request passes from the tokenizer to the engine's front in milliseconds, full queues aside


class ImageStore:
    """Segments by key, an image's digest: those used last are kept up to `capacity` bytes. Thread-safe.

    A request gets links of its own (`lend`), which outlive an eviction. What waits to be taken counts, too: twice the
    capacity is the most that a front has in shared memory.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: bytes; 0 keeps nothing but what is lent. Raises OSError if there is no shared memory."""
        self._capacity = capacity
        self._folder = SegmentFolder()
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[str, int]] = OrderedDict()
        self._num_bytes = 0

    def close(self) -> None:
        """Removes all segments of this front, lent ones that nobody has taken included."""
        self._folder.close()

    @property
    def num_bytes(self) -> int:
        """Of the kept segments."""
        return self._num_bytes

    def lend(self, key: Hashable, num_bytes: int, write: Callable[[str], None]) -> str:
        """The name of a segment with the pixels of the key, which its taker removes. `write` fills the file of a path
        with `num_bytes` unless they are kept; what it raises is raised. Raises CapacityError if too much is lent."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._folder.link(self._kept[key][0])
        self._check_room(num_bytes)
        name = self._folder.new_name()
        try:
            write(str(self._folder.path(name)))
            lent = self._folder.link(name)
        except BaseException:
            remove_segment(name)
            raise
        with self._lock:
            if key in self._kept or num_bytes > self._capacity:  # another request was faster, or it is too large
                remove_segment(name)
            else:
                self._kept[key] = name, num_bytes
                self._num_bytes += num_bytes
            while self._num_bytes > self._capacity:
                _, (evicted, size) = self._kept.popitem(last=False)
                self._num_bytes -= size
                remove_segment(evicted)
        return lent

    def give_back(self, name: str) -> None:
        """Of a lent segment that nobody took."""
        remove_segment(name)

    def _check_room(self, num_bytes: int) -> None:
        waiting = self._folder.remove_forgotten(_FORGOTTEN_S)
        # One image may exceed the capacity when nothing else waits: it is served and not kept.
        if waiting and waiting + num_bytes > self._capacity:
            raise CapacityError(
                f"{waiting} bytes of images wait for the engine; allowed: {self._capacity} (image_cache_bytes); "
                "try again later"
            )
