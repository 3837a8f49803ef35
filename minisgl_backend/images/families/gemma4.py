"""Gemma 4: an image keeps its ratio, in the largest size of so many blocks of patches."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from minisgl_backend.errors import ConfigError, InvalidRequestError
from minisgl_backend.images.family import BICUBIC, Family
from minisgl_backend.images.processor_files import ProcessorFiles
from minisgl_backend.images.sizes import LOW_DETAIL_PIXELS, Size, check_aspect, plain

BUDGETS = (70, 140, 280, 560, 1120)  # vectors of an image, at most: those that the model was trained with


@dataclass(frozen=True)
class Gemma4(Family):
    """The slot is the token of the vectors, as the chat template writes it."""

    begin: str  # the texts around an image
    end: str
    patch: int  # pixels
    pool: int  # patches along a side of the block that a vector stands for
    tokens: int  # of BUDGETS

    OPTIONS: ClassVar[tuple[str, ...]] = ("max_soft_tokens",)

    @classmethod
    def read(cls, files: ProcessorFiles) -> Gemma4:
        names, image = files.tokenizer, files.image
        vector = str(names.get("image_token", "<|image|>"))
        begin, end = str(names.get("boi_token", "<|image>")), str(names.get("eoi_token", "<image|>"))
        tokens = int(image.get("max_soft_tokens", 280))
        if tokens not in BUDGETS:
            raise ConfigError(f"max_soft_tokens is {tokens} in preprocessor_config.json; allowed: {_ALLOWED}")
        return cls(
            slot=vector,
            vector=vector,
            reserved=(begin, end, vector),
            resample=int(image.get("resample", BICUBIC)),
            begin=begin,
            end=end,
            patch=int(image.get("patch_size", files.vision.get("patch_size", 16))),
            pool=int(image.get("pooling_kernel_size", files.vision.get("pooling_kernel_size", 3))),
            tokens=tokens,
        )

    def size(self, width: int, height: int) -> Size:
        check_aspect(width, height)
        block = self.patch * self.pool
        scale = math.sqrt(self.tokens * block**2 / (width * height))
        wide, high = (math.floor(scale * side / block) for side in (width, height))
        if not high:
            wide, high = min(width // height, self.tokens), 1
        elif not wide:
            wide, high = 1, min(height // width, self.tokens)
        grid = (1, high * self.pool, wide * self.pool)
        return plain(wide * block, high * block, grid, (self.begin, wide * high, self.end))

    def limited(self, max_tokens: int) -> Gemma4:
        if max_tokens < BUDGETS[0]:
            raise ConfigError(f"max_image_tokens is {max_tokens}; allowed: {BUDGETS[0]} or more, as of the smallest")
        return self._of(max_tokens)

    def low_detail(self) -> Gemma4:
        return self._of(max(BUDGETS[0], LOW_DETAIL_PIXELS // (self.patch * self.pool) ** 2))

    def _of(self, most: int) -> Gemma4:
        return dataclasses.replace(self, tokens=min(self.tokens, max(one for one in BUDGETS if one <= most)))

    def _changes(self, name: str, value: Any) -> dict[str, Any] | None:
        if name != "max_soft_tokens":
            return None
        if type(value) is not int or value not in BUDGETS:
            raise InvalidRequestError(f"mm_processor_kwargs.{name} is {value!r:.60}; allowed: {_ALLOWED}")
        return {"tokens": min(value, self.tokens)}


_ALLOWED = ", ".join(map(str, BUDGETS))
