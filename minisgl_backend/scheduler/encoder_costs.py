"""What slices of the encoder cost: by calls of a layer that were timed at start, else by their operations."""

from __future__ import annotations

from typing import NamedTuple

from minisgl_backend.encoder_limits import EncoderLimits, num_parts
from minisgl_backend.request import Content


class _Image(NamedTuple):
    patches: int
    in_tile: int
    parts: int  # that a layer is cut into


class EncoderCosts:
    """In prompt tokens that take as long."""

    def __init__(self, limits: EncoderLimits, calls: tuple[tuple[float, float], ...] = ()) -> None:
        """calls: `StepTimes.encoder`, in prompt tokens instead of seconds."""
        self._limits, self._calls = limits, calls

    def most(self, content: Content, first: int, budget: float) -> tuple[int, float]:
        """How many units from `first` on cost at most `budget`, and what they cost."""
        image = self._image(content)
        units, at = self._limits.num_layers * image.parts, first
        spent = 0.0
        while at < units:
            layer, part = divmod(at, image.parts)
            rest = image.parts - part
            before = spent + (self._limits.begin_cost * image.patches if at == 0 else 0.0)
            count, cost = rest, before + self._whole(image, layer, rest)
            while cost > budget and count > 1:
                count -= 1
                cost = before + self._call(image, layer, count)
            if cost > budget:
                break
            at, spent = at + count, cost
            if count < rest:
                break
        return at - first, spent

    def of_one(self, content: Content, first: int) -> float:
        """Of the unit `first` alone."""
        image = self._image(content)
        layer, part = divmod(first, image.parts)
        begin = self._limits.begin_cost * image.patches if first == 0 else 0.0
        call = self._whole if part == image.parts - 1 else self._call
        return begin + call(image, layer, 1)

    def _image(self, content: Content) -> _Image:
        patches = self._limits.num_patches(content)
        parts = num_parts(patches, self._limits.part_patches)
        return _Image(patches, patches // max(content.shape[0], 1), parts)

    def _whole(self, image: _Image, layer: int, parts: int) -> float:
        """Of a layer's last parts, and what follows from it."""
        limits = self._limits
        planes = (layer in limits.plane_layers) + (layer == limits.num_layers - 1)
        return self._call(image, layer, parts) + planes * limits.plane_cost * image.patches

    def _call(self, image: _Image, layer: int, parts: int) -> float:
        limits, seen = self._limits, self._limits.seen(layer, image.in_tile)
        patches = min(image.patches, parts * limits.part_patches or image.patches)
        if not self._calls:
            return patches * (limits.patch_cost + seen * limits.pair_cost)
        timed = min(parts, len(self._calls))
        fixed, of_seen = self._calls[timed - 1]
        share = min(parts / timed, patches / (timed * limits.part_patches))  # of what was timed
        return share * (fixed + seen * of_seen)
