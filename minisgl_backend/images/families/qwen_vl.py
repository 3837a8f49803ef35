"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4.1V: any size, in multiples of merged patches, within an area."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.images.family import BICUBIC, Family, whole_number
from minisgl_backend.images.processor_files import ProcessorFiles
from minisgl_backend.images.sizes import LOW_DETAIL_PIXELS, Size, check_aspect, fitted, plain, side

_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_GLM = (
    *("<|image|>", "<|video|>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
)


@dataclass(frozen=True)
class QwenVL(Family):
    """Positions by row and column in `grid`, before merging."""

    patch: int  # pixels
    merge: int  # patches a side of a token
    min_pixels: int
    max_pixels: int

    OPTIONS: ClassVar[tuple[str, ...]] = ("min_pixels", "max_pixels", "size")
    PIXELS: ClassVar[tuple[int, int]] = (56 * 56, 28 * 28 * 1280)
    SLOT: ClassVar[str] = "<|image_pad|>"
    RESERVED: ClassVar[tuple[str, ...]] = _QWEN

    @classmethod
    def read(cls, files: ProcessorFiles) -> QwenVL:
        image, size = files.image, files.image.get("size")
        least = image.get("min_pixels", side(size, "shortest_edge") if isinstance(size, Mapping) else None)
        most = image.get("max_pixels", side(size, "longest_edge") if isinstance(size, Mapping) else None)
        slot = str(files.tokenizer.get("image_token", cls.SLOT))
        return cls(
            slot=slot,
            vector=slot,
            reserved=tuple(dict.fromkeys((slot, *cls.RESERVED))),
            resample=int(image.get("resample", BICUBIC)),
            patch=int(image.get("patch_size", files.vision.get("patch_size", 14))),
            merge=int(image.get("merge_size", files.vision.get("spatial_merge_size", 2))),
            min_pixels=int(cls.PIXELS[0] if least is None else least),
            max_pixels=int(cls.PIXELS[1] if most is None else most),
        )

    @property
    def factor(self) -> int:
        """Pixels a side of a token."""
        return self.patch * self.merge

    def size(self, width: int, height: int) -> Size:
        check_aspect(width, height)
        wide, high = self._fitted(width, height)
        grid = (1, high // self.patch, wide // self.patch)
        return plain(wide, high, grid, ((high // self.factor) * (wide // self.factor),))

    def _fitted(self, width: int, height: int) -> tuple[int, int]:
        limits = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return fitted(width, height, factor=self.factor, **limits)

    def limited(self, max_tokens: int) -> QwenVL:
        return self._within(max_tokens * self.factor**2)

    def low_detail(self) -> QwenVL:
        return self._within(LOW_DETAIL_PIXELS)

    def _within(self, pixels: int) -> QwenVL:
        most = max(self.factor**2, min(self.max_pixels, pixels))
        return dataclasses.replace(self, max_pixels=most, min_pixels=min(self.min_pixels, most))

    def changed(self, options: Mapping[str, Any]) -> QwenVL:
        found = super().changed(options)
        if found.min_pixels > found.max_pixels:
            raise InvalidRequestError(
                f"mm_processor_kwargs.min_pixels is {found.min_pixels}; allowed: up to max_pixels, {found.max_pixels}"
            )
        return found

    def _changes(self, name: str, value: Any) -> dict[str, Any] | None:
        if name == "size":
            if not isinstance(value, Mapping) or not set(value) <= {"shortest_edge", "longest_edge"}:
                raise InvalidRequestError(
                    f"mm_processor_kwargs.size is {value!r:.60}; allowed: an object of shortest_edge and longest_edge"
                )
            named = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
            return {named[key]: self._limit(f"size.{key}", number) for key, number in value.items()}
        return {name: self._limit(name, value)} if name in ("min_pixels", "max_pixels") else None

    def _limit(self, name: str, value: Any) -> int:
        return max(self.factor**2, min(whole_number(name, value), self.max_pixels))


@dataclass(frozen=True)
class Glm4V(QwenVL):
    """Areas count by frames, of which an image has two."""

    frames: int = 2

    PIXELS: ClassVar[tuple[int, int]] = (112 * 112, 28 * 28 * 15000)
    SLOT: ClassVar[str] = "<|image|>"
    RESERVED: ClassVar[tuple[str, ...]] = _GLM

    @classmethod
    def read(cls, files: ProcessorFiles) -> Glm4V:
        found = super().read(files)
        return dataclasses.replace(found, frames=int(files.image.get("temporal_patch_size", 2)))  # type: ignore

    def _fitted(self, width: int, height: int) -> tuple[int, int]:
        if min(width, height) < self.factor:  # as for a larger image of the same shape
            scale = max(self.factor / height, self.factor / width)
            width, height = int(width * scale), int(height * scale)
        limits = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return fitted(width, height, factor=self.factor, **limits, frames=self.frames, counted=self.frames)

    def _within(self, pixels: int) -> Glm4V:
        return super()._within(pixels * self.frames)  # type: ignore[return-value]
