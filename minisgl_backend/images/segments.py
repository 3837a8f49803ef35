"""Pixels in shared memory: files that processes of one machine hand on by name.

A process has a folder of its own below SHARED. It holds the folder's lock for its life, so that another process can
remove what a killed one left behind. A file's memory is free once no folder has it and no process maps it: who gives
pixels to somebody else makes a second link, and every holder removes its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import re
import secrets
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from minisgl_backend.arrays import UInt8Array

SHARED = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
_PREFIX = "minisgl-images"
_NAME = re.compile(rf"{_PREFIX}-\d+-[0-9a-f]{{16}}/[0-9a-z-]{{1,80}}")
_LOCK = "lock"
_LENT = "lent-"


def shared_bytes() -> int:
    """Of the file system of shared memory, used or not."""
    found = os.statvfs(SHARED)
    return found.f_blocks * found.f_frsize


def open_pixels(name: str, shape: tuple[int, int, int, int]) -> UInt8Array:
    """The pixels of a segment, read only: uint8 [tiles, height, width, 3], mapped and not copied.

    They stay readable when the segment's name is removed. Raises FileNotFoundError if there is no such segment, and
    ValueError for a name that is none, or a shape that does not have the segment's size.
    """
    descriptor = os.open(_path(name), os.O_RDONLY | os.O_NOFOLLOW)
    try:
        expected, found = int(np.prod(shape, dtype=np.int64)), os.fstat(descriptor).st_size
        if found != expected or min(shape) < 1:
            raise ValueError(f"the segment {name} has {found} bytes; expected: {expected} of the shape {shape}")
        mapped = mmap.mmap(descriptor, found, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    return np.frombuffer(mapped, dtype=np.uint8).reshape(shape)


def remove_segment(name: str) -> None:
    """Removes the name; processes that have opened it keep its memory. Raises ValueError for what is no segment."""
    with contextlib.suppress(FileNotFoundError):
        _path(name).unlink()


class SegmentFolder:
    """This process's segments. Thread-safe. Raises OSError if shared memory cannot be written."""

    def __init__(self) -> None:
        remove_abandoned()
        own = f"{os.getuid()}-{secrets.token_hex(8)}"
        new, self._folder = SHARED / f".{_PREFIX}-{own}", SHARED / f"{_PREFIX}-{own}"
        new.mkdir(mode=0o700)
        self._lock = _locked(new)
        new.rename(self._folder)  # locked before another process sees it
        self._numbers = itertools.count()

    def close(self) -> None:
        """Removes all of it. Safe to call twice."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def new_name(self) -> str:
        """For a segment that is to be written: `path` says where."""
        return f"{self._folder.name}/{next(self._numbers)}"

    def path(self, name: str) -> Path:
        return _path(name)

    def link(self, name: str) -> str:
        """A second name for the same pixels, which somebody else removes or takes; see `remove_forgotten`."""
        lent = f"{self._folder.name}/{_LENT}{next(self._numbers)}-{secrets.token_hex(4)}"
        os.link(_path(name), _path(lent))
        return lent

    def take(self, name: str) -> str:
        """Moves a segment that another process has lent into this folder. Raises FileNotFoundError if it is gone."""
        own = self.new_name()
        os.rename(_path(name), _path(own))
        return own

    def remove_forgotten(self, seconds: float) -> int:
        """Removes names from `link` that nobody took for so long: their request was dropped on its way. Returns the
        bytes of those that still wait."""
        waiting = 0
        for path in self._folder.glob(f"{_LENT}*"):
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                if time.time() - found.st_ctime > seconds:
                    path.unlink()
                else:
                    waiting += found.st_size
        return waiting


def remove_abandoned() -> None:
    """Removes the folders of this user whose process has ended without removing them."""
    for folder in SHARED.glob(f"{_PREFIX}-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid() or folder.is_symlink():
                continue
            if (lock := _locked(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _locked(folder: Path) -> int | None:
    """The descriptor of the folder's locked file; None: another process holds the lock. Not inherited by children."""
    descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _path(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r:.120} is no name of a segment")
    return SHARED / name
