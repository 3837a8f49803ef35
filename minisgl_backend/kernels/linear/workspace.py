"""Memory that GEMMs of one device share."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.linear.plain.tiling import MAX_ROWS


class LinearWorkspace:
    """Partial sums and arrival counters of split-K GEMMs; the counters return to zero after every launch."""

    def __init__(self, device: torch.device, max_out: int = 32768, max_split: int = 16) -> None:
        self.partial = torch.empty(max_split * max_out * MAX_ROWS, dtype=torch.float32, device=device)
        self.counters = torch.zeros(max_out, dtype=torch.int32, device=device)
        self.max_split = max_split
