"""What a family makes of an image of some width and height: tiles of pixels, and tokens. Needs the header alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minisgl_backend.errors import InvalidRequestError

Shape = tuple[int, int, int, int]  # of pixels: tiles, height, width, 3
# A step of decoding, with its numbers: ("resize", width, height), ("crop", left, top, width, height), or
# ("pad", width, height, left, top, red, green, blue), which puts the image on a canvas of that size and colour.
Step = tuple[str | int, ...]

MAX_ASPECT = 200  # the longer side by the shorter one
LOW_DETAIL_PIXELS = 512 * 512  # what `detail: low` allows at most


@dataclass(frozen=True)
class View:
    """One way to look at an image: steps from the upright RGB image, whose result is cut into tiles row by row."""

    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Size:
    """What an image becomes."""

    shape: Shape  # of its pixels, all views' tiles in order
    # What the encoder must know besides: positions by time, row and column before merging, or as the family says.
    grid: tuple[int, int, int]
    views: tuple[View, ...]
    # Its place in the prompt, in order: texts, and numbers of tokens that have vectors.
    layout: tuple[str | int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape)

    @property
    def num_vectors(self) -> int:
        return sum(part for part in self.layout if isinstance(part, int))


def plain(width: int, height: int, grid: tuple[int, int, int], layout: tuple[str | int, ...]) -> Size:
    """The whole image at that size."""
    return Size((1, height, width, 3), grid, (View((("resize", width, height),)),), layout)


def fitted(
    width: int, height: int, *, factor: int, min_pixels: int, max_pixels: int, frames: int = 1, counted: int = 1
) -> tuple[int, int]:
    """Width and height nearest to the given ones that are multiples of `factor` and have an allowed area, as Qwen2-VL
    and those after it choose them. `counted`: how often the area counts, `frames`: how often in the given size."""
    wide, high = (round(side / factor) * factor for side in (width, height))
    if counted * wide * high > max_pixels:
        scale = math.sqrt((frames * height * width) / max_pixels)
        wide, high = (max(factor, math.floor(side / scale / factor) * factor) for side in (width, height))
    elif counted * wide * high < min_pixels:
        scale = math.sqrt(min_pixels / (frames * height * width))
        wide, high = (math.ceil(side * scale / factor) * factor for side in (width, height))
    return wide, high


def check_aspect(width: int, height: int) -> None:
    """Raises InvalidRequestError."""
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise InvalidRequestError(
            f"is {width}x{height}; allowed: a longer side of at most {MAX_ASPECT} times the shorter one"
        )


def side(size: Any, *names: str) -> int | None:
    """The first of the names that a processor's size has: {"height": 336, ...}, or one number for all of them, or a
    list that begins with it."""
    if isinstance(size, Mapping):
        return next((int(size[name]) for name in names if size.get(name) is not None), None)
    if isinstance(size, (list, tuple)):
        size = size[0]
    return None if size is None else int(size)
