"""Pixels in shared memory: names, links, eviction, and what a killed process leaves."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minisgl_backend.errors import CapacityError
from minisgl_backend.images.segments import SHARED, SegmentFolder, remove_abandoned, remove_segment
from minisgl_backend.images.store import ImageStore, open_pixels

SHAPE = (1, 4, 5, 3)
PIXELS = np.arange(60, dtype=np.uint8).reshape(SHAPE)


@pytest.fixture
def store():
    with contextlib.closing(ImageStore(150)) as store:
        yield store


def _write(path):
    Path(path).write_bytes(PIXELS.tobytes())


def test_pixels_are_written_once_and_read_by_name(store):
    first = store.lend(b"a", 60, _write)
    second = store.lend(b"a", 60, lambda path: pytest.fail("they are kept"))
    assert first != second
    for name in (first, second):
        assert np.array_equal(open_pixels(name, SHAPE), PIXELS)
    assert store.num_bytes == 60


def test_lent_pixels_outlive_eviction_and_their_name(store):
    lent = store.lend(b"a", 60, _write)
    for key in (b"b", b"c"):
        remove_segment(store.lend(key, 60, _write))
    assert store.num_bytes == 120  # the first one was evicted
    pixels = open_pixels(lent, SHAPE)
    remove_segment(lent)
    assert np.array_equal(pixels, PIXELS)
    written = []
    store.lend(b"a", 60, lambda path: (written.append(path), _write(path)))
    assert written


def test_what_waits_is_bounded(store):
    store.lend(b"a", 60, _write)
    store.lend(b"b", 60, _write)
    with pytest.raises(CapacityError, match="image_cache_bytes"):
        store.lend(b"c", 60, _write)


def test_a_failed_write_leaves_nothing(store):
    def fails(path):
        _write(path)
        raise ValueError("no image")

    with pytest.raises(ValueError, match="no image"):
        store.lend(b"a", 60, fails)
    assert store.num_bytes == 0
    assert np.array_equal(open_pixels(store.lend(b"a", 60, _write), SHAPE), PIXELS)


def test_a_taken_segment_belongs_to_its_taker(store):
    with contextlib.closing(SegmentFolder()) as taker:
        lent = store.lend(b"a", 60, _write)
        own = taker.take(lent)
        with pytest.raises(FileNotFoundError):
            open_pixels(lent, SHAPE)
        store.close()
        assert np.array_equal(open_pixels(own, SHAPE), PIXELS)


@pytest.mark.parametrize("name", ["", "../etc/passwd", "/etc/passwd", "minisgl-images-0-0123456789abcdef/../x"])
def test_only_names_of_segments_are_opened(name):
    with pytest.raises(ValueError, match="no name of a segment"):
        open_pixels(name, SHAPE)


def test_a_shape_of_another_size_is_refused(store):
    with pytest.raises(ValueError, match="60 bytes"):
        open_pixels(store.lend(b"a", 60, _write), (2, 4, 5, 3))


def test_folders_of_killed_processes_are_removed():
    code = (
        "import os, signal; from minisgl_backend.images.segments import SegmentFolder; folder = SegmentFolder();"
        "path = folder.path(folder.new_name()); path.write_bytes(b'x'); print(path.parent.name, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    left = SHARED / subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
    assert left.name.startswith(f"minisgl-images-{os.getuid()}-")
    assert left.is_dir()
    with contextlib.closing(SegmentFolder()) as living:
        path = living.path(living.new_name())
        path.write_bytes(b"x")
        remove_abandoned()
        assert path.exists()
    assert not left.exists()
