"""Attention of encoders: every patch sees all others of its image, or of its window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from minisgl_backend.arrays import Int64Array


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


def windows(rows: int, columns: int, side: int) -> tuple[Int64Array, tuple[int, ...]]:
    """Of a grid's places, int64 [rows * columns]: their order by windows of `side` by `side` places, cut off at the
    grid's end; and how many each window has."""
    row, column = np.divmod(np.arange(rows * columns, dtype=np.int64), columns)
    number = row // side * -(-columns // side) + column // side
    order = np.argsort(number, kind="stable")
    counts = np.bincount(number)
    return order.astype(np.int64), tuple(counts[counts > 0].tolist())


def attend(qkv: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
    """qkv [num_patches, 3, num_heads, head_dim] -> [num_patches, num_heads * head_dim]."""
    parts = []
    for begin, count, length in runs:
        q, k, v = qkv[begin : begin + count * length].unflatten(0, (count, length)).permute(2, 0, 3, 1, 4)
        parts.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def rotate(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates queries and keys in place: qkv [num_patches, 3, num_heads, head_dim], float32 cos and sin [num_patches,
    head_dim / 2]. Dimension i turns with i + head_dim / 2."""
    cos, sin = cos[:, None, None], sin[:, None, None]
    first, second = (half.float() for half in qkv[:, :2].chunk(2, dim=-1))
    qkv[:, :2] = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
