"""Idefics3 and SmolVLM: rows and columns of square tiles, each named by a text, and the whole image last."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from minisgl_backend.errors import ConfigError, InvalidRequestError
from minisgl_backend.images.family import LANCZOS, Family, whole_number
from minisgl_backend.images.processor_files import ProcessorFiles
from minisgl_backend.images.sizes import LOW_DETAIL_PIXELS, Size, Step, View, check_aspect, side

_LARGEST = 4096  # pixels, of the longer side, whatever the files say
_AROUND, _GLOBAL = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True)
class Idefics3(Family):
    """`grid`: tiles, rows and columns of them without the whole image, which is 0 and 0 if it is alone."""

    tile: int  # pixels a side
    longest: int  # pixels, of the longer side before it is cut
    tokens: int  # of a tile
    splits: bool

    OPTIONS: ClassVar[tuple[str, ...]] = ("size", "do_image_splitting")

    @classmethod
    def read(cls, files: ProcessorFiles) -> Idefics3:
        image, edge = files.image, int(files.vision.get("image_size", 364))
        slot = str(files.tokenizer.get("image_token", "<image>"))
        patches = (edge // int(files.vision.get("patch_size", 14))) ** 2
        tokens = patches // int(files.config.get("scale_factor", 2)) ** 2
        return cls(
            slot=slot,
            vector=slot,
            reserved=(slot, _AROUND, _GLOBAL),
            resample=int(image.get("resample", LANCZOS)),
            tile=side(image.get("max_image_size"), "longest_edge") or edge,
            longest=side(image.get("size"), "longest_edge") or 4 * edge,
            tokens=int(files.processor.get("image_seq_len", tokens)),
            splits=bool(image.get("do_image_splitting", True)),
        )

    def size(self, width: int, height: int) -> Size:
        check_aspect(width, height)
        wide, high = _scaled(width, height, self.longest)
        steps: list[Step] = [("resize", wide, high)]
        square: Step = ("resize", self.tile, self.tile)
        if not self.splits:
            return self._whole((*steps, square))
        wide, high = self._multiples(wide, high)
        steps.append(("resize", wide, high))
        columns, rows = wide // self.tile, high // self.tile
        if (rows, columns) == (1, 1):
            return self._whole(tuple(steps))
        layout: list[str | int] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                layout += [f"{_AROUND}<row_{row}_col_{column}>", self.tokens]
            layout.append("\n")
        layout += [f"\n{_AROUND}{_GLOBAL}", self.tokens, _AROUND]
        shape = (rows * columns + 1, self.tile, self.tile, 3)
        views = (View(tuple(steps)), View((*steps, square)))
        return Size(shape, (rows * columns + 1, rows, columns), views, tuple(layout))

    def _whole(self, steps: tuple[Step, ...]) -> Size:
        layout = (f"{_AROUND}{_GLOBAL}", self.tokens, _AROUND)
        return Size((1, self.tile, self.tile, 3), (1, 0, 0), (View(steps),), layout)

    def _multiples(self, width: int, height: int) -> tuple[int, int]:
        """The next multiples of a tile: first the longer side, then the other at the same ratio."""
        ratio = width / height
        if width >= height:
            width = math.ceil(width / self.tile) * self.tile
            return width, math.ceil(int(width / ratio) / self.tile) * self.tile
        height = math.ceil(height / self.tile) * self.tile
        return math.ceil(int(height * ratio) / self.tile) * self.tile, height

    def limited(self, max_tokens: int) -> Idefics3:
        if max_tokens < self.tokens:
            raise ConfigError(f"max_image_tokens is {max_tokens}; allowed: {self.tokens} or more, as of every tile")
        edge = math.isqrt(max_tokens // self.tokens - 1)  # tiles a side of the largest square, beside the whole image
        return self._within(max(1, edge) * self.tile)

    def low_detail(self) -> Idefics3:
        return self._within(max(1, math.isqrt(LOW_DETAIL_PIXELS) // self.tile) * self.tile)

    def _within(self, longest: int) -> Idefics3:
        return dataclasses.replace(self, longest=min(self.longest, longest))

    def _changes(self, name: str, value: Any) -> dict[str, Any] | None:
        if name == "do_image_splitting":
            if not isinstance(value, bool):
                raise InvalidRequestError(f"mm_processor_kwargs.{name} is {value!r:.60}; allowed: true or false")
            return {"splits": value and self.splits}
        if name != "size":
            return None
        given = value.get("longest_edge") if isinstance(value, Mapping) and set(value) == {"longest_edge"} else value
        return {"longest": min(self.longest, whole_number("size.longest_edge", given))}


def _scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """The longer side at that length, the other even; then at most _LARGEST."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _LARGEST:
        width, height = _LARGEST, int(_LARGEST / ratio)
    elif height > width and height > _LARGEST:
        width, height = int(_LARGEST * ratio), _LARGEST
    return max(width, 1), max(height, 1)
