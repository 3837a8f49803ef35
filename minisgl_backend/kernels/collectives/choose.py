"""Up to how many rows the ranks of one machine all-reduce through shared GPU memory, and not NCCL. Needs no Triton."""

from __future__ import annotations

import torch

# The largest sum that the next norm makes (all_reduce_norm.py), by number of ranks. Every rank sends all of it to every
# other, so that the more ranks there are, the sooner NCCL's rings and trees are faster.
MOST_NORM_BYTES = {2: 40 << 20, 3: 1 << 20, 4: 512 << 10, 5: 384 << 10, 6: 256 << 10, 7: 256 << 10, 8: 256 << 10}
MOST_COPY_BYTES = 128 << 20  # of a rank's partial sum that copy engines send to the others
MOST_COPY_RANKS = 2  # every rank sends its whole partial sum to all others: with more ranks, NCCL's rings send less


def most_rows(size: int, hidden: int, dtype: torch.dtype) -> int:
    """Rows of the largest all-reduce over `size` ranks that is fused into the next norm; 0: none is."""
    row_bytes = hidden * dtype.itemsize
    return 0 if row_bytes % 16 else MOST_NORM_BYTES.get(size, 0) // row_bytes
