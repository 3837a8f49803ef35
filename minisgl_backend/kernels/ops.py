"""The operations between attention and GEMMs, each of which a fused kernel may serve.

`Ops` is the contract; `torch_ops.TorchOps` serves it on every device and is the reference that other implementations
are tested against.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kv.layout import LayerKV


@dataclass(frozen=True, kw_only=True)
class QKNormRope:
    """Parameters of a layer's query and key transform: RMSNorm of each head, then the rotary embedding."""

    q_norm: torch.Tensor | None  # [head_dim]; None: no norm
    k_norm: torch.Tensor | None
    cos_sin: torch.Tensor  # float32 [max_position, head_dim]: cosines of the head_dim / 2 angles, then sines
    eps: float  # of the norms
    # int32 [max_rows], for kernels that know the tokens' rows and true positions alone: what is added to these.
    shifts: torch.Tensor | None = None


class TokenPlaces(NamedTuple):
    """Where the tokens of a step are."""

    positions: torch.Tensor  # int [num_tokens], in `cos_sin`
    slots: torch.Tensor  # int [num_tokens], in the KV pool


@dataclass(frozen=True, kw_only=True)
class LatentNormRope:
    """Parameters of a layer's transform of latents (MLA): their RMSNorm, and the rotation of queries and key."""

    norm: torch.Tensor  # [rank]
    cos_sin: torch.Tensor  # float32 [max_position, rope_dim], as in QKNormRope
    eps: float


class Ops(ABC):
    """Norms, rotary embedding and cache stores on tensors of one device. Chosen once, then passed to every layer.

    Statistics, rotations and activations are computed in float32 whatever the format of the tensors is.
    No method synchronises with the device. GEMMs are not here but methods of the weights (`weights.method`).
    """

    facts: DeviceFacts | None = None  # of a device that this project has kernels for; None: torch computes everything

    @abstractmethod
    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [num_tokens, size] -> x / rms(x) * weight, same shape and dtype, in `out` (which may be x) where given.

        Rows of x and out may be strided. weight [size] may be float32 where x is not, here and in `add_norm`.
        """

    @abstractmethod
    def add_norm(
        self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, multiplier: float = 1.0
    ) -> torch.Tensor:
        """hidden + multiplier * rms_norm(x), all [num_tokens, size]; hidden may be overwritten."""

    @abstractmethod
    def gate(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """x * sigmoid(gates), [num_tokens, size] each, written over x; rows of gates may be strided."""

    @abstractmethod
    def rope_store(
        self, qkv: torch.Tensor, rotation: QKNormRope, at: TokenPlaces, kv: LayerKV, num_q_heads: int
    ) -> torch.Tensor:
        """Per-head norm of q and k (where weights are given), rotary embedding, and the store into the KV pool.

        qkv [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim] may be overwritten. A head's first half pairs with
        its second half. kv in any number format: keys and values are divided by
        its scales and saturate at the format's largest number.
        Returns q [num_tokens, num_q_heads, head_dim], possibly a view of qkv.
        """

    @abstractmethod
    def latent_store(
        self, q: torch.Tensor, latents: torch.Tensor, rotation: LatentNormRope, at: TokenPlaces, kv: LayerKV
    ) -> torch.Tensor:
        """Norm of latents, rotary embedding, and the store into the KV pool (MLA).

        q [num_tokens, num_q_heads, nope_dim + rope_dim] is rotated in place in its last rope_dim dimensions, and
        returned. latents [num_tokens, rank + rope_dim]: the first rank numbers are normed and stored, the others
        rotated and stored. kv.k [num_pages, 1, page_size, rank + rope_dim], in
        the dtype of latents or in FP8, for which numbers are divided by its scale and saturate. Rows of q and latents
        may be strided.
        """
