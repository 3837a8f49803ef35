"""The adapters of one linear layer: what the factors of their slots add to its outputs."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.lora.choose import LoraKernels
from minisgl_backend.kernels.lora.reference import LoraFactors


class LoraSite:
    """Beside one linear weight of a rank, split over the ranks as it is. Slots count from 1."""

    def __init__(self, factors: LoraFactors, kernels: LoraKernels) -> None:
        self.factors, self._kernels = factors, kernels

    def add_to(
        self, out: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, activation: str | None = None
    ) -> torch.Tensor:
        """out [num_tokens, local outputs], which may be overwritten, plus what the adapters in `slots`, int32
        [num_tokens], make of x [num_tokens, local inputs]. activation: of gate and up, see `GemmCall`."""
        self._kernels.add(out, x, slots, self.factors)
        return out if activation is None else self._kernels.activate_mul(out, activation)
