"""Attention of encoders: every patch sees all others of its image, or of its window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from minisgl_backend.arrays import Int64Array
from minisgl_backend.kernels.upload import to_device

_FEW = 64  # patches of segments whose queries are taken together in tiles of as many; of longer ones in twice as many


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

    def __init__(self, lengths: Sequence[int], device: torch.device, *, fused: bool) -> None:
        """fused: for the kernel of a GPU, else for torch's."""
        self.runs = runs_of(lengths)
        self._tiles: tuple[torch.Tensor, torch.Tensor, int] | None = None
        if fused:
            tile = _FEW if max(lengths) <= _FEW else 2 * _FEW
            bounds = np.cumsum([0, *lengths], dtype=np.int32)
            counts = -(-np.asarray(lengths) // tile)  # of tiles
            segments = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
            within = np.arange(counts.sum(), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
            tiles = np.stack([segments, bounds[segments] + within * tile]).astype(np.int32)
            self._tiles = to_device(bounds, device), to_device(tiles, device), tile

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """qkv [num_patches, 3, num_heads, head_dim] -> [num_patches, num_heads * head_dim]."""
        if self._tiles is not None:
            from minisgl_backend.kernels.attention.segments import segment_attention

            return segment_attention(qkv, *self._tiles)
        parts = []
        for begin, count, length in self.runs:
            q, k, v = qkv[begin : begin + count * length].unflatten(0, (count, length)).permute(2, 0, 3, 1, 4)
            parts.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1))
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
