"""Up to how many rows the ranks of one machine all-reduce through shared GPU memory, and not NCCL. Needs no Triton."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# The largest sum that the next norm makes (all_reduce_norm.py), by number of ranks. Every rank sends all of it to every
# other, so that the more ranks there are, the sooner another way is faster.
MOST_NORM_BYTES = {2: 40 << 20, 3: 1 << 20, 4: 320 << 10, 5: 384 << 10, 6: 256 << 10, 7: 256 << 10, 8: 256 << 10}
# Larger sums that the next norm makes in two shots (two_shot_norm.py). On four H200s that is faster than one shot from
# 48 rows of 5,120 on, and than NCCL up to all that were tried (2,048 rows); other numbers of ranks were not tried.
MOST_TWO_SHOT_BYTES = {4: 20 << 20}
MOST_COPY_BYTES = 128 << 20  # of a rank's partial sum that copy engines send to the others
MOST_COPY_RANKS = 2  # every rank sends its whole partial sum to all others: with more ranks, NCCL's rings send less


def most_rows(size: int, hidden: int, dtype: torch.dtype) -> int:
    """Rows of the largest all-reduce over `size` ranks that is fused into the next norm in one shot; 0: none is."""
    return _rows(MOST_NORM_BYTES, size, hidden, dtype)


def most_two_shot_rows(size: int, hidden: int, dtype: torch.dtype) -> int:
    """Likewise in two shots; a multiple of `size`."""
    return _rows(MOST_TWO_SHOT_BYTES, size, hidden, dtype) // size * size


def _rows(most_bytes: Mapping[int, int], size: int, hidden: int, dtype: torch.dtype) -> int:
    row_bytes = hidden * dtype.itemsize
    return 0 if row_bytes % 16 else most_bytes.get(size, 0) // row_bytes
