"""Attention of encoders: every patch sees all others of its image, or of its window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from minisgl_backend.arrays import Int64Array
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.upload import to_device

_FEW = 64  # patches of segments whose queries are taken together in tiles of as many; of longer ones in twice as many

_LONG = 8192  # patches of segments whose keys may be shared by two programs, which costs partial results


class Run(NamedTuple):
    """Segments of equal length, one after the other; a patch sees its own segment."""

    begin: int
    segments: int
    length: int


def runs_of(lengths: Sequence[int]) -> tuple[Run, ...]:
    """Segments of these lengths, in order, as few runs."""
    runs: list[Run] = []
    begin = 0
    for length in lengths:
        if runs and runs[-1].length == length:
            runs[-1] = runs[-1]._replace(segments=runs[-1].segments + 1)
        else:
            runs.append(Run(begin, 1, length))
        begin += length
    return tuple(runs)


class Segments:
    """Patches one after the other, of which each sees its own segment. For all layers of a pass."""

    def __init__(self, lengths: Sequence[int], device: torch.device, *, part: int, fused: bool) -> None:
        """part: patches that are asked for together, or a multiple of it. fused: for the kernel of a GPU, which
        is as fast as cuDNN's (400 TFLOP/s for 10,000 patches) and needs no plan, of 40 to 500 ms, for each shape."""
        self._runs = runs_of(lengths)
        self._starts: Int64Array = np.empty(0, dtype=np.int64)  # of tiles
        self._tiles: Any = None
        self._are_long, self._multiprocessors = min(lengths) >= _LONG, 0
        if fused:
            self._multiprocessors = DeviceFacts.of(device).multiprocessors
            from minisgl_backend.kernels.attention.segments import Tiles

            size = _FEW if max(lengths) <= _FEW else 2 * _FEW
            bounds = np.cumsum([0, *lengths])
            cuts = np.union1d(bounds, np.arange(0, bounds[-1], part))  # that no tile has inside
            counts = -(-np.diff(cuts) // size)
            within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            self._starts = np.repeat(cuts[:-1], counts) + within * size
            stops = np.minimum(self._starts + size, np.repeat(cuts[1:], counts))
            segments = np.searchsorted(bounds, self._starts, side="right") - 1
            places = np.stack([segments, self._starts, stops], axis=1).astype(np.int32)
            self._tiles = Tiles(to_device(bounds.astype(np.int32), device), to_device(places, device), size)

    def attend(self, qkv: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Of the patches `first` to `last` - 1: qkv [num_patches, 3, num_heads, head_dim] -> [last - first, num_heads *
        head_dim]."""
        if self._tiles is not None:
            from minisgl_backend.kernels.attention.segments import halves_pay, segment_attention

            begin, end = np.searchsorted(self._starts, (first, last)).tolist()
            tiles = self._tiles._replace(places=self._tiles.places[begin:end])
            in_halves = self._are_long and halves_pay(end - begin, qkv.shape[2], self._multiprocessors)
            return segment_attention(qkv, tiles, first, last, in_halves=in_halves)
        parts = []
        for begin, count, length in self._runs:
            low, high = max(first - begin, 0), min(last - begin, count * length)
            while low < high:
                segment, inside = divmod(low, length)
                whole = (high - low) // length if not inside else 0
                q, k, v = (
                    qkv[begin + segment * length :][: max(whole, 1) * length]
                    .unflatten(0, (-1, length))
                    .permute(2, 0, 3, 1, 4)
                )
                stop = length if whole else min(length, inside + high - low)
                found = F.scaled_dot_product_attention(q[:, :, inside:stop], k, v)
                parts.append(found.transpose(1, 2).flatten(2).flatten(0, 1))
                low += whole * length or stop - inside
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def windows(rows: int, columns: int, side: int) -> tuple[Int64Array, tuple[int, ...]]:
    """Of a grid's places, int64 [rows * columns]: their order by windows of `side` by `side` places, cut off at the
    grid's end; and how many each window has. Windows of equal size follow each other."""
    row, column = np.divmod(np.arange(rows * columns, dtype=np.int64), columns)
    number = row // side * -(-columns // side) + column // side
    counts = np.bincount(number)
    rank = np.empty_like(counts)
    by_size = np.argsort(-counts, kind="stable")
    rank[by_size] = np.arange(len(counts))
    order = np.argsort(rank[number], kind="stable")
    return order.astype(np.int64), tuple(counts[by_size].tolist())


def rotate(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates queries and keys in place: qkv [num_patches, 3, num_heads, head_dim], float32 cos and sin [num_patches,
    head_dim / 2]. Dimension i turns with i + head_dim / 2. `kernels.attention.segments.rotate` is the same."""
    cos, sin = cos[:, None, None], sin[:, None, None]
    first, second = (half.float() for half in qkv[:, :2].chunk(2, dim=-1))
    qkv[:, :2] = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
