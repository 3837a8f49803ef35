"""The host's side of images: where rows have them, what a step encodes, and which tokens get vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from minisgl_backend.arrays import Int32Array, UInt8Array
from minisgl_backend.encoder_limits import EncoderLimits
from minisgl_backend.request import Content
from minisgl_backend.runner.image_positions import positions_of, shift_of
from minisgl_backend.runner.plan_arrays import PrefillHost
from minisgl_backend.step import EncodeSlice, RowError, StepPlan, vectors_key

OpenPixels = Callable[[str, tuple[int, int, int, int]], UInt8Array]
"""The pixels of a segment, uint8 [tiles, height, width, 3], by its name and shape."""


@dataclass(frozen=True)
class Gathered:
    """Some of an image's vectors, those of consecutive tokens."""

    key: bytes
    first: int
    last: int  # the one behind


@dataclass(frozen=True)
class StepImages:
    """What a step does with images, as planned on the host."""

    freed: tuple[bytes, ...] = ()
    encode: tuple[EncodeSlice, ...] = ()
    pixels: dict[bytes, UInt8Array] = field(default_factory=dict)  # of images that begin
    gathered: tuple[Gathered, ...] = ()  # in the order of `given_rows`

    @property
    def encodes(self) -> bool:
        return bool(self.freed or self.encode)


NO_IMAGES = StepImages()


class RowImages:
    """Of one rank. Every step passes through `build`, and so does each further attempt at it."""

    def __init__(
        self, max_rows: int, limits: EncoderLimits, *, merge: int, has_axes: bool, open_pixels: OpenPixels
    ) -> None:
        """`merge`: patches along a vector's side; `has_axes`: the model's rotation has tokens on several axes."""
        self._limits, self._merge, self._has_axes = limits, merge, has_axes
        self._open_pixels = open_pixels
        self._contents: dict[int, tuple[Content, ...]] = {}  # by row
        self._keys: dict[int, tuple[bytes, ...]] = {}
        self._done: dict[bytes, int] = {}  # units of images, by the steps built so far
        self._shifts: Int32Array = np.zeros(max_rows, dtype=np.int32)  # of decoding rows
        self._shifted: set[int] = set()  # rows that ever had one, which the device may still have

    def build(self, plan: StepPlan) -> StepImages:
        """Admits rows and checks that what chunks need is there. Raises RowError, before anything is changed for the
        row, where its pixels cannot be read or vectors are missing."""
        for admitted in plan.admitted:
            self._admit(admitted.row, admitted.contents, admitted.params.cache_salt)
        for key in plan.freed_vectors:
            self._done.pop(key, None)
        done, pixels = dict(self._done), {}
        for one in plan.encode:
            if done.get(one.key, 0) < one.first:
                raise RowError(one.row, ValueError("an image's encoding was interrupted"))
            if one.first == 0:
                pixels[one.key] = self._pixels_of(one)
            done[one.key] = max(done.get(one.key, 0), one.last)
        gathered = tuple(self._gather(plan, done)) if self._contents else ()
        self._done = done
        if not (plan.freed_vectors or plan.encode or gathered):
            return NO_IMAGES
        return StepImages(plan.freed_vectors, plan.encode, pixels, gathered)

    def arrays(self, plan: StepPlan, prefill: PrefillHost | None) -> dict[str, Int32Array]:
        """To be uploaded, by name: the shifts of admitted rows; which of the step's tokens get vectors; where the
        rotation has its tokens, int32 [num_tokens] or by axis [3, num_tokens]. Names without entries are left out."""
        arrays: dict[str, Int32Array] = {}
        if any(admitted.row in self._shifted for admitted in plan.admitted):
            arrays["rope_shifts"] = self._shifts[[admitted.row for admitted in plan.admitted]]
        if prefill is None or not self._contents:
            return arrays
        rows = self._given_rows(plan, prefill)
        if len(rows):
            arrays["given_rows"] = rows
        decodes = self._shifts[plan.decode_rows]
        is_seen = any(self._contents.get(chunk.row) for chunk in plan.prefill)
        if self._has_axes and (is_seen or decodes.any()):
            parts = [positions_of(self._contents.get(c.row, ()), c.start, c.end, self._merge) for c in plan.prefill]
            parts.append(np.tile(plan.decode_lengths - 1 + decodes, (3, 1)))
            positions = np.concatenate(parts, axis=1)
            arrays["rope_positions"] = positions if len(rows) else positions[0]
        return arrays

    def spans(self, plan: StepPlan) -> list[list[tuple[int, int]]]:
        """Of each chunk, where tokens see each other: the runs of vectors that it has a part of, by position."""
        found = [
            [run for one in self._contents.get(chunk.row, ()) for run in one.vector_runs()] for chunk in plan.prefill
        ]
        return [
            [(start, end) for start, end in runs if start < chunk.end and end > chunk.start]
            for runs, chunk in zip(found, plan.prefill, strict=True)
        ]

    def was_shifted(self, row: int) -> bool:
        """Whether the device may know a shift of the row."""
        return row in self._shifted

    def ends(self, one: EncodeSlice) -> bool:
        """Whether an image's vectors are complete with this slice."""
        return one.last == self._limits.num_units(one.content)

    def is_plain(self, row: int) -> bool:
        """Whether a row has no image, so that a pass of its prompt may know nothing of them."""
        return row not in self._contents and not self._shifts[row]

    def _admit(self, row: int, contents: tuple[Content, ...], salt: str | None) -> None:
        self._contents.pop(row, None)
        self._keys.pop(row, None)
        self._shifts[row] = 0
        if contents:
            self._contents[row] = contents
            self._keys[row] = tuple(vectors_key(content, salt) for content in contents)
            if self._has_axes:
                self._shifts[row] = shift_of(contents, self._merge)
                self._shifted.add(row)

    def _pixels_of(self, one: EncodeSlice) -> UInt8Array:
        """Of the request that asks, or of another with the same image."""
        error: Exception | None = None
        for content in (one.content, *self._others(one.key)):
            try:
                return self._open_pixels(content.pixels, content.shape)
            except Exception as failure:
                error = error or failure
        assert error is not None, "the first one failed"
        raise RowError(one.row, error) from error

    def _others(self, key: bytes) -> Iterator[Content]:
        for row, keys in self._keys.items():
            yield from (content for content, own in zip(self._contents[row], keys, strict=True) if own == key)

    def _gather(self, plan: StepPlan, done: dict[bytes, int]) -> Sequence[Gathered]:
        found = []
        for chunk in plan.prefill:
            for content, key in zip(self._contents.get(chunk.row, ()), self._keys.get(chunk.row, ()), strict=False):
                if content.start >= chunk.end or content.end <= chunk.start:
                    continue
                if done.get(key) != self._limits.num_units(content):
                    raise RowError(chunk.row, ValueError("an image's vectors are missing"))
                before = 0
                for start, end in content.vector_runs():
                    first, last = max(start, chunk.start), min(end, chunk.end)
                    if first < last:
                        found.append(Gathered(key, before + first - start, before + last - start))
                    before += end - start
        return found

    def _given_rows(self, plan: StepPlan, prefill: PrefillHost) -> Int32Array:
        """Tokens of the step that get vectors, int32 [num_vectors], as `_gather` lists these."""
        parts = [np.empty(0, dtype=np.int32)]
        for chunk, offset in zip(plan.prefill, prefill.cu_seqlens.tolist(), strict=False):
            for content in self._contents.get(chunk.row, ()):
                for start, end in content.vector_runs():
                    first, last = max(start, chunk.start), min(end, chunk.end)
                    parts.append(np.arange(first, max(first, last), dtype=np.int32) + (offset - chunk.start))
        return np.concatenate(parts)
