"""The adapters of one linear layer: the factors of all slots, and what they add to its outputs."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.lora.choose import choose_lora
from minisgl_backend.kernels.lora.reference import LoraFactors
from minisgl_backend.weights.method import LinearSpec


class LoraSite:
    """Beside one linear weight of a rank, split over the ranks as it is. Slots count from 1."""

    def __init__(
        self, spec: LinearSpec, *, num_slots: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """rank: the largest of all adapters. dtype: of the model."""
        self.spec = spec
        self._kernels = kernels = choose_lora(device, dtype)
        rank, sizes = -(-rank // kernels.rank_multiple) * kernels.rank_multiple, [one.local for one in spec.outputs]
        self.factors = LoraFactors.empty(num_slots, sizes, spec.local_inputs, rank, kernels.dtype, device)

    def add_to(
        self, out: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, activation: str | None = None
    ) -> torch.Tensor:
        """out [num_tokens, local outputs], which may be overwritten, plus what the adapters in `slots`, int32
        [num_tokens], make of x [num_tokens, local inputs]. activation: of gate and up, see `GemmCall`."""
        self._kernels.add(out, x, slots, self.factors)
        return out if activation is None else self._kernels.activate_mul(out, activation)
