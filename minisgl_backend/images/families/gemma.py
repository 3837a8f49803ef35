"""Gemma 3: one square, or besides it crops of long images (pan and scan), each of as many tokens."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from minisgl_backend.errors import ConfigError, InvalidRequestError
from minisgl_backend.images.family import BILINEAR, Family, whole_number
from minisgl_backend.images.processor_files import ProcessorFiles
from minisgl_backend.images.sizes import Size, Step, View, check_aspect, side


@dataclass(frozen=True)
class Gemma3(Family):
    """The slot is the token of an image's beginning, as in Google's prompts."""

    end: str  # the text behind an image
    width: int
    height: int
    tokens: int  # of a square
    scans: bool = False  # pan and scan
    min_crop: int = 256  # pixels
    max_crops: int = 4
    min_ratio: float = 1.2

    OPTIONS: ClassVar[tuple[str, ...]] = (
        "do_pan_and_scan",
        "pan_and_scan_min_crop_size",
        "pan_and_scan_max_num_crops",
        "pan_and_scan_min_ratio_to_activate",
    )

    @classmethod
    def read(cls, files: ProcessorFiles) -> Gemma3:
        names = files.tokenizer
        begin, end = str(names.get("boi_token", "<start_of_image>")), str(names.get("eoi_token", "<end_of_image>"))
        vector = str(names.get("image_token", "<image_soft_token>"))
        size, edge = files.image.get("size"), int(files.vision.get("image_size", 896))
        return cls(
            slot=begin,
            vector=vector,
            reserved=(begin, end, vector),
            resample=int(files.image.get("resample", BILINEAR)),
            end=end,
            width=side(size, "width") or edge,
            height=side(size, "height") or edge,
            tokens=int(files.processor.get("image_seq_length", files.config.get("mm_tokens_per_image", 256))),
        )

    def size(self, width: int, height: int) -> Size:
        check_aspect(width, height)
        resized: Step = ("resize", self.width, self.height)
        crops = [View((crop, resized)) for crop in self._crops(width, height)] if self.scans else []
        square: tuple[str | int, ...] = (f"\n\n{self.slot}", self.tokens, f"{self.end}\n\n")
        layout = square
        if crops:
            layout = ("Here is the original image ", *square, " and here are some crops to help you see better ")
            layout += (*square, *itertools.chain.from_iterable((" ", *square) for _ in crops[1:]))
        shape = (1 + len(crops), self.height, self.width, 3)
        return Size(shape, (1 + len(crops), 0, 0), (View((resized,)), *crops), layout)

    def _crops(self, width: int, height: int) -> list[Step]:
        longer, shorter = max(width, height), min(width, height)
        if longer / shorter < self.min_ratio:
            return []
        number = min(math.floor(longer / self.min_crop), math.floor(longer / shorter + 0.5))
        number = min(self.max_crops, max(2, number))
        wide, high = (math.ceil(width / number), height) if width >= height else (width, math.ceil(height / number))
        if min(wide, high) < self.min_crop:
            return []
        places = [(wide * k, 0) if width >= height else (0, high * k) for k in range(number)]
        return [("crop", x, y, min(wide, width - x), min(high, height - y)) for x, y in places]

    def limited(self, max_tokens: int) -> Gemma3:
        if max_tokens < self.tokens:
            raise ConfigError(f"max_image_tokens is {max_tokens}; allowed: {self.tokens} or more, as of every image")
        crops = min(self.max_crops, max_tokens // self.tokens - 1)
        return dataclasses.replace(self, max_crops=crops, scans=self.scans and crops >= 2)

    def low_detail(self) -> Gemma3:
        return dataclasses.replace(self, scans=False)

    def _changes(self, name: str, value: Any) -> dict[str, Any] | None:
        if name == "do_pan_and_scan":
            if not isinstance(value, bool):
                raise InvalidRequestError(f"mm_processor_kwargs.{name} is {value!r:.60}; allowed: true or false")
            return {"scans": value and self.max_crops >= 2}
        if name == "pan_and_scan_min_crop_size":
            return {"min_crop": whole_number(name, value)}
        if name == "pan_and_scan_max_num_crops":
            return {"max_crops": min(whole_number(name, value, 2), self.max_crops)}
        if name != "pan_and_scan_min_ratio_to_activate":
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= 1000:
            raise InvalidRequestError(f"mm_processor_kwargs.{name} is {value!r:.60}; allowed: a number from 1 to 1000")
        return {"min_ratio": float(value)}
