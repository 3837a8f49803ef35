"""`Ops` on a GPU, by kernels in the Triton language."""

from __future__ import annotations

import torch

from minisgl_backend.kernels import elementwise as fused
from minisgl_backend.kernels.attention.latent_store import latent_store
from minisgl_backend.kernels.carveout import LARGEST_HIDDEN, prefer_shared_memory
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.launch import MAX_PDL_TOKENS
from minisgl_backend.kernels.linear.plain.tiling import MAX_ROWS
from minisgl_backend.kernels.ops import LatentNormRope, QKNormRope, TokenPlaces
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.kv.layout import LayerKV


class TritonOps(TorchOps):
    """See `Ops`."""

    facts: DeviceFacts

    def __init__(self, device: torch.device, hidden_size: int | None = None, facts: DeviceFacts | None = None) -> None:
        """`hidden_size`: of the dense model, where it is known: small models get another carveout, see carveout.py.
        facts: of another device than this one, to choose kernels for."""
        self.facts = facts or DeviceFacts.of(device)
        if self.has_pdl and hidden_size is not None and hidden_size <= LARGEST_HIDDEN:
            prefer_shared_memory()

    @property
    def has_pdl(self) -> bool:
        """Programmatic dependent launch, see plain/small_rows.py."""
        return self.facts.dependent_launch

    def pdl(self, x: torch.Tensor) -> bool:
        """Whether to launch with PDL: not at large batch, where it takes room from the kernel that is still running."""
        return self.has_pdl and x.shape[0] <= MAX_ROWS

    def moe_pdl(self, x: torch.Tensor) -> bool:
        """`pdl` for mixtures, also at large batch: their tiny sorting kernels leave room for one that starts early."""
        return self.has_pdl and x.shape[0] <= MAX_PDL_TOKENS

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return fused.rms_norm(x, weight, eps, self.pdl(x), out)

    def add_norm(
        self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, multiplier: float = 1.0
    ) -> torch.Tensor:
        return fused.add_norm(hidden, x, weight, eps, multiplier, self.pdl(x))

    def gate(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return fused.gate(x, gates, self.pdl(x))

    def rope_store(
        self, qkv: torch.Tensor, rotation: QKNormRope, at: TokenPlaces, kv: LayerKV, num_q_heads: int
    ) -> torch.Tensor:
        return fused.rope_store(qkv, rotation, at, kv, num_q_heads, self.pdl(qkv))

    def latent_store(
        self, q: torch.Tensor, latents: torch.Tensor, rotation: LatentNormRope, at: TokenPlaces, kv: LayerKV
    ) -> torch.Tensor:
        return latent_store(q, latents, rotation, at, kv, self.pdl(q))
