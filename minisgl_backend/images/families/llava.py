"""LLaVA: one square. LLaVA-NeXT and LLaVA-OneVision: the square, and tiles of the resolution that fits best."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.images.family import BICUBIC, Family
from minisgl_backend.images.processor_files import ProcessorFiles
from minisgl_backend.images.sizes import LOW_DETAIL_PIXELS, Size, Step, View, check_aspect, side

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)


@dataclass(frozen=True)
class Llava(Family):
    """LLaVA 1.5 and those like it."""

    width: int  # of the tower's input
    height: int
    patch: int
    more: int  # vectors of a square beside those of its patches: a class token that is kept, or one that is left out
    shortest: int = 0  # the shorter side is resized to it and the middle cut out; 0: resized without regard to ratio
    pad: tuple[int, ...] = ()  # colour that makes the image a square first

    @classmethod
    def read(cls, files: ProcessorFiles) -> Llava:
        image, size = files.image, files.image.get("size")
        crop = image.get("crop_size") if image.get("do_center_crop", True) else None
        edge = int(files.vision.get("image_size", 336))
        square = side(size, "shortest_edge") if isinstance(size, Mapping) else size
        mean = image.get("image_mean", _CLIP_MEAN)
        return cls(
            **_common(files),
            width=side(crop, "width") or side(size, "width", "shortest_edge") or edge,
            height=side(crop, "height") or side(size, "height", "shortest_edge") or edge,
            shortest=int(square or 0) if crop is not None else 0,
            pad=tuple(int(part * 255) for part in mean) if image.get("do_pad", False) else (),
        )

    def size(self, width: int, height: int) -> Size:
        check_aspect(width, height)
        steps: list[Step] = []
        if self.pad and width != height:
            edge = max(width, height)
            steps.append(("pad", edge, edge, (edge - width) // 2, (edge - height) // 2, *self.pad))
            width = height = edge
        if self.shortest:
            wide, high = self.shortest, int(self.shortest * height / width)
            if width > height:
                wide, high = int(self.shortest * width / height), self.shortest
            steps.append(("resize", wide, high))
            steps += _centre(wide, high, self.width, self.height)
        else:
            steps.append(("resize", self.width, self.height))
        tokens = (self.height // self.patch) * (self.width // self.patch) + self.more
        return Size((1, self.height, self.width, 3), (1, 0, 0), (View(tuple(steps)),), (tokens,))

    def limited(self, max_tokens: int) -> Llava:
        if max_tokens < (tokens := self.size(1, 1).num_vectors):
            raise ConfigError(f"max_image_tokens is {max_tokens}; allowed: {tokens} or more, as of every image")
        return self


@dataclass(frozen=True)
class LlavaNext(Family):
    """`grid`: tiles, and the image's own height and width, by which the tower's answer is cut and joined."""

    edge: int  # pixels a side of a tile
    patch: int
    more: int  # as of `Llava`
    resolutions: tuple[tuple[int, int], ...]  # height and width
    max_squares: int = 0  # more tokens than of that many tiles are reduced; 0: never (LLaVA-NeXT)

    @classmethod
    def read(cls, files: ProcessorFiles) -> LlavaNext:
        size, crop = files.image.get("size"), files.image.get("crop_size")
        edge = side(crop, "height") or side(size, "height", "shortest_edge") or int(files.vision.get("image_size", 336))
        found = files.image.get("image_grid_pinpoints", files.config.get("image_grid_pinpoints"))
        if not found:
            raise ConfigError("image_grid_pinpoints is missing in preprocessor_config.json; allowed: resolutions")
        aspect = str(files.value("vision_aspect_ratio", "anyres_max_9"))
        is_onevision = files.config.get("model_type") == "llava_onevision"
        return cls(
            **_common(files),
            edge=edge,
            resolutions=tuple((int(high), int(wide)) for high, wide in found),
            max_squares=int(aspect.rpartition("_")[2]) if is_onevision else 0,
        )

    @property
    def side(self) -> int:
        """Patches a side of a tile."""
        return self.edge // self.patch

    def size(self, width: int, height: int) -> Size:
        check_aspect(width, height)
        high, wide = self._resolution(width, height)
        square = View((("resize", self.edge, self.edge),))
        scale = min(wide / width, high / height)
        inner = (wide, min(math.ceil(height * scale), high))
        if not wide / width < high / height:
            inner = (min(math.ceil(width * scale), wide), high)
        left, top = (wide - inner[0]) // 2, (high - inner[1]) // 2
        tiled = View((("resize", *inner), ("pad", wide, high, left, top, 0, 0, 0)))
        tiles = 1 + (high // self.edge) * (wide // self.edge)
        layout = (self.side**2 + self.more + self._features(width, height, high, wide),)
        return Size((tiles, self.edge, self.edge, 3), (tiles, height, width), (square, tiled), layout)

    def _resolution(self, width: int, height: int) -> tuple[int, int]:
        """Height and width: the one that keeps most of the image, then the one that wastes least."""

        def kept(one: tuple[int, int]) -> tuple[int, int]:
            scale = min(one[1] / width, one[0] / height)
            effective = min(int(width * scale) * int(height * scale), width * height)
            return effective, effective - one[0] * one[1]

        return max(self.resolutions, key=kept)

    def _features(self, width: int, height: int, high: int, wide: int) -> int:
        """Vectors of the tiles without those of the padding, and one behind each row."""
        rows, columns = self.side * (high // self.edge), self.side * (wide // self.edge)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        if self.max_squares:
            ratio = math.sqrt(rows * columns / (self.max_squares * self.side**2))
            if ratio > 1.1:
                rows, columns = int(rows // ratio), int(columns // ratio)
        return rows * columns + rows

    def limited(self, max_tokens: int) -> LlavaNext:
        """Only with the resolutions that never need more."""

        def most(one: tuple[int, int]) -> int:
            return self.side**2 + self.more + self._features(one[1], one[0], *one)

        found = tuple(one for one in self.resolutions if most(one) <= max_tokens)
        if not found:
            least = min(map(most, self.resolutions))
            raise ConfigError(f"max_image_tokens is {max_tokens}; allowed: {least} or more with this model")
        return dataclasses.replace(self, resolutions=found)

    def low_detail(self) -> LlavaNext:
        least = min(high * wide for high, wide in self.resolutions)
        allowed = max(LOW_DETAIL_PIXELS, least)
        return dataclasses.replace(
            self, resolutions=tuple(one for one in self.resolutions if one[0] * one[1] <= allowed)
        )


def _common(files: ProcessorFiles) -> dict[str, Any]:
    """Fields of all of these."""
    slot = str(files.processor.get("image_token", files.tokenizer.get("image_token", "<image>")))
    has_class = 1 if files.vision.get("model_type", "clip_vision_model") == "clip_vision_model" else 0
    more = int(files.processor.get("num_additional_image_tokens", has_class))
    strategy = files.value("vision_feature_select_strategy", "default")
    return {
        "slot": slot,
        "vector": slot,
        "reserved": (slot,),
        "resample": int(files.image.get("resample", BICUBIC)),
        "patch": int(files.processor.get("patch_size", files.vision.get("patch_size", 14))),
        "more": more - (1 if strategy == "default" else 0),
    }


def _centre(width: int, height: int, wide: int, high: int) -> list[Step]:
    """The middle of that size, black where the image ends before."""
    if width >= wide and height >= high:
        if (width, height) == (wide, high):
            return []
        return [("crop", (width - wide) // 2, (height - high) // 2, wide, high)]
    canvas = max(width, wide), max(height, high)
    left, top = (math.ceil((canvas[0] - width) / 2), math.ceil((canvas[1] - height) / 2))
    return [
        ("pad", *canvas, left, top, 0, 0, 0),
        ("crop", (canvas[0] - wide) // 2, (canvas[1] - high) // 2, wide, high),
    ]
