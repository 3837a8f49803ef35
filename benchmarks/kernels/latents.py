"""Attention over latents (MLA): decode and prefill kernels of this project against those of libraries."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.kernels.timing import Timer
from minisgl_backend.attention.base import AttentionSpec, DecodeInputs, LayerGroup
from minisgl_backend.attention.layer import LatentHeads, LatentProjection
from minisgl_backend.attention.registry import create_attention
from minisgl_backend.kernels.attention.calls import CachedLayer, Expanded
from minisgl_backend.kernels.attention.latent_decode import (
    LatentDecodeBatch,
    LatentDecodeShape,
    LatentDecodeWorkspace,
    latent_decode_attention,
    latent_decode_shape,
)
from minisgl_backend.kernels.attention.latent_prefill import latent_prefill_attention
from minisgl_backend.kv.latent import LatentLayout
from minisgl_backend.kv.layout import LayerKV
from minisgl_backend.kv.pool import KVPool

RANK, ROPE, NOPE, VALUE, PAGE = 512, 64, 128, 128, 64
SCALE = (NOPE + ROPE) ** -0.5
LAYER_BATCHES, LAYER_TOKENS, LAYER_HEADS = (1, 2, 4, 8, 16, 64), (1024, 8192), (16, 32, 128)
BACKENDS = ("triton", "fa", "flashmla")
CASES = ((1, 1024), (1, 8192), (1, 16000), (64, 1024), (64, 8192), (64, 16000))  # batch, tokens of each sequence
# Rows, tile, warps, stages.
FEW_ROWS = [(16, 32, 4, 3), (16, 32, 4, 5), (16, 64, 4, 2), (16, 64, 8, 2), (16, 128, 8, 2)]
MANY_ROWS = [(64, 64, 8, 2), (64, 32, 8, 3), (32, 64, 8, 2), (32, 32, 4, 3)]


def bench_latents(results: dict[str, dict], tune: bool, timer: Timer) -> None:
    """Microseconds of one layer."""
    for (batch, tokens), heads in itertools.product(CASES, (16, 128)):
        found: dict[str, Any] = {}
        _bench_decode(found, batch, tokens, heads, tune, timer)
        results[f"latents {heads} heads {batch}x{tokens}"] = found
        if not timer.compiles_only:
            print(f"latents {heads} heads {batch}x{tokens}", found, flush=True)
    results["latents prefill"] = _bench_prefill(timer)
    if not timer.compiles_only:
        for heads, batch, tokens in itertools.product(LAYER_HEADS, LAYER_BATCHES, LAYER_TOKENS):
            found = {name: _bench_layer(name, batch, tokens, heads, timer) for name in BACKENDS}
            results[f"latents layer {heads} heads {batch}x{tokens}"] = found
            print(f"latents layer {heads} heads {batch}x{tokens}", found, flush=True)


def _bench_layer(name: str, batch: int, tokens: int, heads: int, timer: Timer) -> float | str:
    """Microseconds of a backend's decode attention of one layer, both products with `kv_b_proj` included, as it is
    captured in an engine; what it plans once a step is not."""
    try:
        case = _LayerCase(batch, tokens, heads)
        backend = create_attention(name, name, case.spec)
        backend.allocate_graph(batch)
        plan = backend.plan_capture(case.inputs)
        return round(timer([functools.partial(backend.attend, layer, case.q, plan) for layer in case.layers], 5), 1)
    except Exception as error:  # a package that is not there is a result too
        return f"{type(error).__name__} {error}"[:40]


class _LayerCase:
    """Layers of DeepSeek's sizes with random latents and weights, and a decode step of `batch` sequences."""

    def __init__(self, batch: int, tokens: int, heads: int) -> None:
        pages = -(-tokens // PAGE)
        count = max(2, min(20, int(1e9 / (batch * pages * PAGE * 1152))))  # past the L2 cache
        device, dtype = torch.device("cuda"), torch.bfloat16
        sizes = LatentHeads(rank=RANK, nope_dim=NOPE, rope_dim=ROPE, v_dim=VALUE)
        group = LayerGroup(
            layers=tuple(range(count)), num_q_heads=heads, kv=LatentLayout(rank=RANK, rope_dim=ROPE, dtype=dtype),
            scale=SCALE, latent=sizes,
        )  # fmt: skip
        self.spec = AttentionSpec(
            groups=(group,), page_size=PAGE, max_seq_len=pages * PAGE, max_rows=257, dtype=dtype, device=device
        )
        pool = KVPool(self.spec.places, PAGE, batch * pages, device)
        weight = torch.randn(heads, NOPE + VALUE, RANK, dtype=dtype, device=device) * RANK**-0.5
        self.layers = []
        for index in range(count):
            pool.layer(index).k.normal_()
            # Only prefill expands.
            projection = LatentProjection(weight=weight, v_dim=VALUE, expand_into=lambda latents, out: None)
            self.layers.append(self.spec.layer(index, pool.layer(index), latent=projection))
        table = torch.zeros(257, pages, dtype=torch.int32)
        table[:batch] = torch.randperm(batch * pages).int().view(batch, pages) + 1
        lens, rows = np.full(batch, tokens, np.int32), np.arange(batch, dtype=np.int32)
        self.inputs = DecodeInputs(
            kv_lens=torch.from_numpy(lens).to(device), rows=torch.from_numpy(rows).to(device),
            page_table=table.to(device), kv_lens_host=lens, rows_host=rows,
        )  # fmt: skip
        self.q = torch.randn(batch, heads, NOPE + ROPE, device=device).to(dtype)


def _bench_decode(found: dict[str, Any], batch: int, tokens: int, heads: int, tune: bool, timer: Timer) -> None:
    pages = -(-tokens // PAGE)
    layers = 1 if timer.compiles_only else max(1, min(20, int(1e9 / (batch * pages * PAGE * 1152))))
    caches = [torch.randn(batch * pages + 1, 1, PAGE, RANK + ROPE, device="cuda").bfloat16() for _ in range(layers)]
    table = (torch.randperm(batch * pages, device="cuda").int() + 1).view(batch, pages)
    lens = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, heads, RANK + ROPE, device="cuda").bfloat16()
    parts = q[..., :RANK].contiguous(), q[..., RANK:]
    workspace = LatentDecodeWorkspace(heads, RANK, 65, torch.device("cuda"))
    shapes = {"chosen": latent_decode_shape(batch, heads)}
    if tune and tokens < 16000:
        for cut in FEW_ROWS if heads == 16 else MANY_ROWS:
            for factor in (1, 2):
                workers = min(264, max(1, factor * 132 // -(-heads // cut[0])))
                shapes[f"r{cut[0]} t{cut[1]} w{cut[2]} s{cut[3]} x{workers}"] = LatentDecodeShape(*cut, workers)
    # What is compiled does not depend on how many programs share the tiles.
    if timer.compiles_only:
        if (batch, tokens) != CASES[0]:
            return
        shapes = {(s.rows, s.tile, s.num_warps, s.num_stages): s for s in shapes.values()}  # type: ignore[misc]
    calls: dict[str, list[Callable[[], object]]] = {
        str(label): [
            functools.partial(
                latent_decode_attention,
                *parts,
                CachedLayer(kv=LayerKV(c, c), scale=SCALE),
                LatentDecodeBatch(rows, lens, table, workspace, shape),
            )
            for c in caches
        ]
        for label, shape in shapes.items()
    }
    if not timer.compiles_only:
        calls |= _libraries(q, caches, table, lens)
    for label, ways in calls.items():
        try:
            found[label] = round(timer(ways, 5), 1)
        except Exception as error:  # a shape that does not fit the chip is a result too
            found[label] = f"{type(error).__name__} {error}"[:40]


def _libraries(q: torch.Tensor, caches: list[torch.Tensor], table: torch.Tensor, lens: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    views = [cache.transpose(1, 2) for cache in caches]
    try:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        found["FA3"] = [
            functools.partial(
                flash_attn_with_kvcache, q=q[..., RANK:].unsqueeze(1), k_cache=c[..., RANK:], v_cache=c[..., :RANK],
                qv=q[..., :RANK].unsqueeze(1), page_table=table, cache_seqlens=lens, softmax_scale=SCALE, causal=True,
            )
            for c in views
        ]  # fmt: skip
        from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

        tiles, splits = get_mla_metadata(lens, q.shape[1], 1)
        found["FlashMLA"] = [
            functools.partial(
                flash_mla_with_kvcache, q.unsqueeze(1), c, table, lens, RANK, tiles, splits, SCALE, True
            )
            for c in views
        ]  # fmt: skip
    except Exception as error:
        print("libraries:", repr(error)[:200], flush=True)
    return found


def _bench_prefill(timer: Timer, heads: int = 16, tokens: int = 4000, batch: int = 4) -> dict[str, Any]:
    """Whole prompts, expanded at once."""
    count = tokens * batch
    q = torch.randn(count, heads, NOPE + ROPE, device="cuda").bfloat16()
    expanded = torch.randn(count, heads, NOPE + VALUE, device="cuda").bfloat16()
    keys = torch.randn(count, ROPE, device="cuda").bfloat16()
    out = torch.empty(count, heads, VALUE, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(count, heads, device="cuda")
    starts = range(0, count, tokens)
    segments = torch.tensor([[s, s + tokens, s, s + tokens, 0, 0] for s in starts], dtype=torch.int32, device="cuda")
    ours = functools.partial(latent_prefill_attention, Expanded(q, expanded, keys, out, lse), segments, tokens, SCALE)
    found = {"triton": round(timer([ours], 5), 1)}
    if not timer.compiles_only:
        try:
            from sgl_kernel.flash_attn import flash_attn_varlen_func

            k = torch.cat([expanded[..., :NOPE], keys.unsqueeze(1).expand(-1, heads, -1)], dim=-1)
            at = torch.arange(0, count + 1, tokens, dtype=torch.int32, device="cuda")
            theirs = functools.partial(
                flash_attn_varlen_func, q, k, expanded[..., NOPE:], cu_seqlens_q=at, cu_seqlens_k=at,
                max_seqlen_q=tokens, max_seqlen_k=tokens, softmax_scale=SCALE, causal=True,
            )  # fmt: skip
            found["FA3"] = round(timer([theirs], 5), 1)
        except Exception as error:
            print("libraries:", repr(error)[:200], flush=True)
        print(f"latents prefill {batch}x{tokens}, {heads} heads", found, flush=True)
    return found
