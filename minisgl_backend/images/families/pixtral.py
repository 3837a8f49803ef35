"""Pixtral's tower in Mistral 3 and others: any size within a square, a text behind each row of tokens."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from minisgl_backend.errors import ConfigError
from minisgl_backend.images.family import BICUBIC, Family, whole_number
from minisgl_backend.images.processor_files import ProcessorFiles
from minisgl_backend.images.sizes import LOW_DETAIL_PIXELS, Size, check_aspect, plain, side


@dataclass(frozen=True)
class Pixtral(Family):
    """`grid`: rows and columns of patches, before merging."""

    row_end: str
    end: str
    patch: int  # pixels
    merge: int  # patches a side of a token
    longest: int  # pixels, of the longer side

    OPTIONS: ClassVar[tuple[str, ...]] = ("size",)

    @classmethod
    def read(cls, files: ProcessorFiles) -> Pixtral:
        processor, size = files.processor, files.image.get("size")
        names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
        slot, row_end, end = (str(processor.get(name, text)) for name, text in names.items())
        merge = int(files.value("spatial_merge_size", 1))
        # The processor's is the tower's; the image processor's own may be that of merged patches.
        patch = processor.get("patch_size", files.vision.get("patch_size"))
        return cls(
            slot=slot,
            vector=slot,
            reserved=(slot, row_end, end),
            resample=int(files.image.get("resample", BICUBIC)),
            row_end=row_end,
            end=end,
            patch=int(16 if patch is None else patch),
            merge=merge,
            longest=side(size, "longest_edge", "height") or int(files.vision.get("image_size", 1024)),
        )

    @property
    def factor(self) -> int:
        """Pixels a side of a token."""
        return self.patch * self.merge

    def size(self, width: int, height: int) -> Size:
        check_aspect(width, height)
        scale = max(height / self.longest, width / self.longest)
        if scale > 1:
            width, height = (max(1, math.floor(one / scale)) for one in (width, height))
        columns, rows = ((one - 1) // self.factor + 1 for one in (width, height))
        layout = (*((columns, self.row_end) * rows)[:-1], self.end)
        grid = (1, rows * self.merge, columns * self.merge)
        return plain(columns * self.factor, rows * self.factor, grid, layout)

    def limited(self, max_tokens: int) -> Pixtral:
        most = math.isqrt(max_tokens)  # a side of the largest square
        if most < 1:
            raise ConfigError(f"max_image_tokens is {max_tokens}; allowed: 1 or more")
        return self._within(most * self.factor)

    def low_detail(self) -> Pixtral:
        return self._within(math.isqrt(LOW_DETAIL_PIXELS))

    def _within(self, longest: int) -> Pixtral:
        return dataclasses.replace(self, longest=min(self.longest, longest))

    def _changes(self, name: str, value: Any) -> dict[str, Any] | None:
        if name != "size":
            return None
        given = value.get("longest_edge") if isinstance(value, dict) and set(value) == {"longest_edge"} else value
        return {"longest": min(self.longest, whole_number("size.longest_edge", given))}
