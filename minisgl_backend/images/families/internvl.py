"""InternVL: tiles of the arrangement nearest to the image's ratio, and the whole image behind them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from minisgl_backend.errors import ConfigError, InvalidRequestError
from minisgl_backend.images.family import BICUBIC, Family, whole_number
from minisgl_backend.images.processor_files import ProcessorFiles
from minisgl_backend.images.sizes import LOW_DETAIL_PIXELS, Size, View, check_aspect, side


@dataclass(frozen=True)
class InternVL(Family):
    """`grid`: tiles, and rows and columns of them."""

    begin: str
    end: str
    width: int  # of a tile
    height: int
    tokens: int  # of a tile
    min_tiles: int
    max_tiles: int  # without the whole image

    OPTIONS: ClassVar[tuple[str, ...]] = ("min_patches", "max_patches", "max_dynamic_patch", "crop_to_patches")

    @classmethod
    def read(cls, files: ProcessorFiles) -> InternVL:
        names, image, size = files.tokenizer, files.image, files.image.get("size")
        begin, end = str(names.get("start_image_token", "<img>")), str(names.get("end_image_token", "</img>"))
        slot = str(names.get("context_image_token", "<IMG_CONTEXT>"))
        edge = side(files.vision.get("image_size"), "height") or 448
        patches = edge // (side(files.vision.get("patch_size"), "height") or 14)
        tokens = int((patches * float(files.config.get("downsample_ratio", 0.5))) ** 2)
        return cls(
            slot=slot,
            vector=slot,
            reserved=(slot, begin, end, str(names.get("video_token", "<video>"))),
            resample=int(image.get("resample", BICUBIC)),
            begin=begin,
            end=end,
            width=side(size, "width") or edge,
            height=side(size, "height") or edge,
            tokens=int(files.processor.get("image_seq_length", tokens)),
            min_tiles=int(image.get("min_patches", 1)),
            max_tiles=int(image.get("max_patches", 12)),
        )

    def size(self, width: int, height: int) -> Size:
        check_aspect(width, height)
        columns, rows = self._arrangement(width, height) if self.max_tiles > 1 else (1, 1)
        views = [View((("resize", columns * self.width, rows * self.height),))]
        if rows * columns > 1:
            views.append(View((("resize", self.width, self.height),)))
        tiles = rows * columns + len(views) - 1
        layout = (self.begin, tiles * self.tokens, self.end)
        return Size((tiles, self.height, self.width, 3), (tiles, rows, columns), tuple(views), layout)

    def _arrangement(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows whose ratio is nearest to the image's; of equal ratios the most tiles that the image's area
        more than half fills."""
        limits = range(1, self.max_tiles + 1)
        allowed = [(w, h) for w in limits for h in limits if self.min_tiles <= w * h <= self.max_tiles]
        best, nearest = (1, 1), float("inf")
        for columns, rows in sorted(allowed, key=lambda one: one[0] * one[1]):
            distance = abs(width / height - columns / rows)
            area = self.width * self.height * columns * rows
            if distance < nearest or (distance == nearest and width * height > 0.5 * area):
                best, nearest = (columns, rows), distance
        return best

    def limited(self, max_tokens: int) -> InternVL:
        tiles = max_tokens // self.tokens
        if tiles < 1:
            raise ConfigError(f"max_image_tokens is {max_tokens}; allowed: {self.tokens} or more, as of every tile")
        return self._within(max(1, tiles - 1))

    def low_detail(self) -> InternVL:
        return self._within(max(1, LOW_DETAIL_PIXELS // (self.width * self.height)))

    def _within(self, tiles: int) -> InternVL:
        return dataclasses.replace(
            self, max_tiles=min(self.max_tiles, tiles), min_tiles=min(self.min_tiles, self.max_tiles, tiles)
        )

    def _changes(self, name: str, value: Any) -> dict[str, Any] | None:
        if name == "crop_to_patches":
            if not isinstance(value, bool):
                raise InvalidRequestError(f"mm_processor_kwargs.{name} is {value!r:.60}; allowed: true or false")
            return {} if value else {"max_tiles": 1, "min_tiles": 1}
        if name == "min_patches":
            return {"min_tiles": min(whole_number(name, value), self.max_tiles)}
        if name in ("max_patches", "max_dynamic_patch"):
            most = min(whole_number(name, value), self.max_tiles)
            return {"max_tiles": most, "min_tiles": min(self.min_tiles, most)}
        return None
