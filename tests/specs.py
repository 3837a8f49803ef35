"""Attention specs for tests."""

from __future__ import annotations

import torch

from minisgl_backend.attention.base import AttentionSpec, LayerGroup
from minisgl_backend.attention.layer import LatentHeads
from minisgl_backend.kv.latent import LatentLayout
from minisgl_backend.kv.layout import ONE, KVScales, MHALayout
from minisgl_backend.kv.pool import KVPool


def one_group(
    *,
    num_layers: int = 1,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    max_seq_len: int,
    max_rows: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    kv_dtype: torch.dtype | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
) -> AttentionSpec:
    """All layers alike; keys and values in `kv_dtype`, or in `dtype` where it is None."""
    kv = MHALayout(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=kv_dtype or dtype)
    group = LayerGroup(
        layers=tuple(range(num_layers)),
        num_q_heads=num_q_heads,
        kv=kv,
        window=window,
        chunk=chunk,
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    return AttentionSpec(
        groups=(group,),
        page_size=page_size,
        max_seq_len=max_seq_len,
        max_rows=max_rows,
        dtype=dtype,
        device=torch.device(device),
    )


def latent_group(
    heads: LatentHeads,
    *,
    num_layers: int = 1,
    num_q_heads: int,
    page_size: int,
    max_seq_len: int,
    max_rows: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    kv_dtype: torch.dtype | None = None,
) -> AttentionSpec:
    """All layers alike, and keep latents (MLA), in `kv_dtype`, or in `dtype` where it is None."""
    group = LayerGroup(
        layers=tuple(range(num_layers)),
        num_q_heads=num_q_heads,
        kv=LatentLayout(rank=heads.rank, rope_dim=heads.rope_dim, dtype=kv_dtype or dtype),
        scale=heads.qk_dim**-0.5,
        latent=heads,
    )
    return AttentionSpec(
        groups=(group,),
        page_size=page_size,
        max_seq_len=max_seq_len,
        max_rows=max_rows,
        dtype=dtype,
        device=torch.device(device),
    )


def make_pool(spec: AttentionSpec, num_pages: int, scales: KVScales = ONE) -> KVPool:
    return KVPool(spec.places, spec.page_size, num_pages, spec.device, [scales] * len(spec.places))
