"""`Ops` in plain torch, for any device: used by CPU serving, and the reference of all kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.ops import LatentNormRope, Ops, QKNormRope, TokenPlaces
from minisgl_backend.kv.layout import LayerKV

_ALPHA, _LIMIT = 1.702, 7.0  # of swiglu_oai, in all released models


class TorchOps(Ops):
    """See `Ops`."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        normed = _rms_norm(x, weight, eps)
        return normed.to(x.dtype) if out is None else out.copy_(normed)

    def add_norm(
        self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, multiplier: float = 1.0
    ) -> torch.Tensor:
        return (hidden.float() + multiplier * _rms_norm(x, weight, eps)).to(hidden.dtype)

    def gate(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return x.mul_(gates.float().sigmoid())

    def rope_store(
        self, qkv: torch.Tensor, rotation: QKNormRope, at: TokenPlaces, kv: LayerKV, num_q_heads: int
    ) -> torch.Tensor:
        _, num_kv_heads, _, head_dim = kv.k.shape
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        qk, v = heads.split([num_q_heads + num_kv_heads, num_kv_heads], dim=1)
        qk = qk.float()
        q_norm, k_norm = rotation.q_norm, rotation.k_norm
        if q_norm is not None and k_norm is not None:
            # q and k heads are normed together; only their weights differ.
            weight = torch.cat([q_norm.expand(num_q_heads, head_dim), k_norm.expand(num_kv_heads, head_dim)]).float()
            qk = qk * torch.rsqrt(qk.square().mean(-1, keepdim=True) + rotation.eps) * weight
        rotated = _rotated(qk, rotation.cos_sin[at.positions].unsqueeze(1)).to(qkv.dtype)
        q, k = rotated.split([num_q_heads, num_kv_heads], dim=1)
        store_tokens(kv.k, k, at.slots, kv.scales.k)
        store_tokens(kv.v, v, at.slots, kv.scales.v)
        return q

    def latent_store(
        self, q: torch.Tensor, latents: torch.Tensor, rotation: LatentNormRope, at: TokenPlaces, kv: LayerKV
    ) -> torch.Tensor:
        rank = len(rotation.norm)
        latent, key = latents.split([rank, latents.shape[1] - rank], dim=1)
        angles = rotation.cos_sin[at.positions]
        normed = _rms_norm(latent, rotation.norm, rotation.eps).to(latents.dtype)
        stored = torch.cat([normed, _rotated(key, angles)], dim=1)
        store_tokens(kv.k, stored.unsqueeze(1), at.slots, kv.scales.k)
        turned = q[..., q.shape[-1] - key.shape[1] :]
        turned.copy_(_rotated(turned, angles.unsqueeze(1)))
        return q


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In float32."""
    x32 = x.float()
    return x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [..., size], whose first half pairs with its second; angles float32 [..., size]: cosines,
    then sines."""
    cos, sin = angles.chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def store_tokens(cache: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, scale: float = 1.0) -> None:
    """Writes tokens [num_tokens, num_kv_heads, head_dim], divided by `scale`, to a cache as in kv.layout.

    slots int [num_tokens]. Values saturate at the largest number of the cache's format.
    """
    page_size = cache.shape[2]
    pages = torch.div(slots, page_size, rounding_mode="floor")
    if tokens.dtype != cache.dtype:
        largest = torch.finfo(cache.dtype).max
        tokens = (tokens.float() / scale).clamp_(-largest, largest).to(cache.dtype)
    as_bits(cache)[pages, :, slots - pages * page_size] = as_bits(tokens)


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """FP8 numbers as bytes, everything else as it is: torch indexes no FP8 tensors."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def activate_mul(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """gate_up [num_tokens, 2 * size] -> activation(first half) * second half, [num_tokens, size].

    swiglu_oai: of both clamped, gate * sigmoid(alpha * gate) * (up + 1)."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "swiglu_oai":
        gate, up = gate.float().clamp(max=_LIMIT), up.float().clamp(-_LIMIT, _LIMIT)
        return (gate * torch.sigmoid(_ALPHA * gate) * (up + 1.0)).to(gate_up.dtype)
    return (activate(gate.float(), activation) * up.float()).to(gate_up.dtype)


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """A `layers.config.UngatedActivation` of each element; the same shape."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate={"gelu": "none", "gelu_tanh": "tanh"}[activation])
