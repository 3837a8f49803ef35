"""The tasks of a worker, one after the other."""

from __future__ import annotations

import errno
import os

from minisgl_backend.images.decode import ImageRefused, Opened, open_image, open_raw, pixels_of, rgb
from minisgl_backend.images.tasks import Answer, Decode, Open


class Work:
    """One worker's state: the image that is open."""

    def __init__(self) -> None:
        self._opened: Opened | None = None

    def answer(self, task: Open | Decode, data: bytes) -> Answer:
        """`data`: the file, of `Open`. Whatever is wrong with an image becomes an answer."""
        try:
            return self._open(task, data) if isinstance(task, Open) else self._decode(task)
        except ImageRefused as error:
            return Answer(refused=str(error))
        except MemoryError:
            return Answer(refused="needs more memory than a worker may have; allowed: a smaller image")
        except OSError as error:
            return Answer(full=error.errno in (errno.ENOSPC, errno.EDQUOT), refused=f"cannot be kept: {error.strerror}")
        except Exception as error:
            return Answer(refused=f"cannot be decoded ({type(error).__name__}); allowed: another file")

    def _open(self, task: Open, data: bytes) -> Answer:
        self._opened = None
        self._opened = open_image(data) if task.raw is None else open_raw(data, *task.raw, task.turn)
        width, height = self._opened.upright
        return Answer(width=width, height=height)

    def _decode(self, task: Decode) -> Answer:
        opened, self._opened = self._opened, None
        if opened is None:
            return Answer(refused="is not open")
        pixels = pixels_of(rgb(opened, task.background), task.views, task.shape, task.resample)
        descriptor = os.open(task.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            left = memoryview(pixels.data).cast("B")
            while left:
                left = left[file.write(left) :]
        return Answer()
