"""How many rows the ranks of one machine sum through memory that they share; more are NCCL's. Needs no Triton."""

from __future__ import annotations

import torch

# The largest sum that the next norm makes (all_reduce_norm.py), by number of ranks. Every rank sends all of it to every
# other, so that the more ranks there are, the sooner NCCL's rings and trees are faster.
MOST_NORM_BYTES = {2: 40 << 20, 3: 1 << 20, 4: 512 << 10, 5: 384 << 10, 6: 256 << 10, 7: 256 << 10, 8: 256 << 10}
MOST_COPY_BYTES = 128 << 20  # of a rank's part that copy engines bring to the others
MOST_COPY_RANKS = 2  # every rank sends all of its part to all others: with more, NCCL's rings send less


def most_rows(size: int, hidden: int, dtype: torch.dtype) -> int:
    """Rows of the largest sum over `size` ranks that the next norm makes; 0: none is."""
    row_bytes = hidden * dtype.itemsize
    return 0 if row_bytes % 16 else MOST_NORM_BYTES.get(size, 0) // row_bytes
