"""Where the rotation has the tokens of a prompt with images (M-RoPE; Qwen, 2024: Qwen2-VL).

A text token is one position behind the one before it, on all three axes. An image begins there, too; its vectors are at
their row and column, and what follows it is behind the larger of both. So all behind an image is shifted by a constant.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl_backend.arrays import Int32Array
from minisgl_backend.request import Content


def shift_of(contents: Sequence[Content], merge: int) -> int:
    """Of the tokens behind these images, added to their true positions. `merge`: patches along a vector's side."""
    return sum(max(one.grid[1], one.grid[2]) // merge - one.length for one in contents)


def positions_of(contents: Sequence[Content], start: int, end: int, merge: int) -> Int32Array:
    """By axis (time, row, column), of tokens `start` to `end` - 1: int32 [3, end - start]."""
    positions = np.tile(np.arange(start, end, dtype=np.int32), (3, 1))
    shift = 0
    for content in contents:
        if content.start >= end:
            break
        inside = _of_image(content, merge) + np.int32(content.start + shift)
        first, last = max(content.start, start), min(content.end, end)
        if first < last:
            positions[:, first - start : last - start] = inside[:, first - content.start : last - content.start]
        shift += shift_of((content,), merge)
        positions[:, max(content.end, start) - start :] = np.arange(
            max(content.end, start) + shift, end + shift, dtype=np.int32
        )
    return positions


def _of_image(content: Content, merge: int) -> Int32Array:
    """From its own beginning: int32 [3, length]."""
    frames, rows, columns = content.grid[0], content.grid[1] // merge, content.grid[2] // merge
    places: Int32Array = np.indices((frames, rows, columns), dtype=np.int32).reshape(3, -1)
    return places
