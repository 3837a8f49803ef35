"""Decode attention over the paged KV cache, in the Triton language: one query token per sequence.

Flash decoding (Dao et al., 2023): a sequence's cache is split into at most `num_splits` parts, each computed by its own
program for all query heads of one KV head; the program that finishes a sequence last merges the partial results, so
that no second kernel is needed. The parts adapt to each sequence's length, hence one captured graph serves every length
and a long sequence is not left to one multiprocessor. With a sliding window only the tiles that it touches are read.

At batch sizes that would need slightly more programs than run at once, persistent programs share the tiles of all
sequences evenly instead, as Stream-K (Osama et al., 2023) does for GEMMs and FlashInfer (Ye et al., 2025) for
attention. Each program computes from the lengths where its share begins, so the host plans nothing here either.

`rotating_decode_attention` starts from the projected qkv rows: head norms, the rotary embedding and the store of the
new token's keys and values happen in the same kernel. The new token is then not read from the cache: all that is read
there was written in earlier steps, and reading can begin before this layer's qkv GEMM has ended.

An FP8 cache halves the bytes read: numbers are converted in registers, the keys' scale is folded into the scale of the
scores, and the values' scale into the result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from minisgl_backend.kernels.attention.calls import CachedLayer
from minisgl_backend.kernels.attention.choose import DecodeShape
from minisgl_backend.kernels.attention.decode_kernel import balanced_decode_kernel, decode_kernel
from minisgl_backend.kernels.attention.scores import capped_scale
from minisgl_backend.kernels.elementwise import largest_number
from minisgl_backend.kernels.launch import next_power_of_2, pdl_options
from minisgl_backend.kernels.ops import QKNormRope
from minisgl_backend.kv.layout import FP8

# Bytes of one token's keys, one head, for which the shapes were measured. With larger heads the early tile would spill
# registers, and two tiles would not fit in shared memory.
MAX_HEAD_BYTES = 256
MAX_PROGRAMS_FACTOR = 8  # parts a sequence for which there is room at the largest batch
# Least capacity in parts. `decode_shape` never splits few sequences further, so no other number of parts is compiled.
LEAST_PARTS = 512
LEAST_TILES = 2  # per program, where programs share all tiles


class DecodeWorkspace:
    """Partial results and arrival counters for one backend; the counters return to zero after every launch."""

    def __init__(
        self, max_batch: int, num_q_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        parts = max(max_batch * MAX_PROGRAMS_FACTOR, LEAST_PARTS)
        self.partial = torch.empty(parts * num_q_heads * head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(parts * num_q_heads, dtype=torch.float32, device=device)
        self.counters = torch.zeros(max_batch * num_kv_heads, dtype=torch.int32, device=device)
        self.parts = parts
        self.batch_padded = next_power_of_2(max_batch)


class DecodeBatch(NamedTuple):
    """A step's decode part, made once for all layers of a group. Captured graphs read the tensors."""

    rows: torch.Tensor  # int32 [batch]; of the page table
    kv_lens: torch.Tensor  # int32 [batch]; 1 or more
    page_table: torch.Tensor  # int32 [max_rows, max_pages]
    workspace: DecodeWorkspace
    shape: DecodeShape
    pdl: bool = False  # programmatic dependent launch (Hopper and later), whose rules are in plain/small_rows.py


def decode_attention(
    q: torch.Tensor, layer: CachedLayer, batch: DecodeBatch, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of one query token per sequence over its kv_lens cached tokens, or those of its window or chunk.

    q [batch, num_q_heads, head_dim] (rows may be strided, heads of a row follow each other). Returns the same shape, in
    `out` if given.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    _launch(q, None, layer, batch, out)
    return out


def rotating_decode_attention(
    qkv: torch.Tensor, rotation: QKNormRope, layer: CachedLayer, batch: DecodeBatch
) -> torch.Tensor:
    """`Ops.rope_store` and decode_attention in one kernel.

    qkv [batch, (num_q_heads + 2 * num_kv_heads) * head_dim] is only read; the token of each sequence is the last of
    its kv_lens, and its keys and values go to the slot that the page table names. Returns [batch, num_q_heads,
    head_dim].
    """
    _, num_kv_heads, _, head_dim = layer.kv.k.shape
    num_q_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    out = torch.empty((qkv.shape[0], num_q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    _launch(qkv, rotation, layer, batch, out)
    return out


def _launch(
    q: torch.Tensor, rotation: QKNormRope | None, layer: CachedLayer, batch: DecodeBatch, out: torch.Tensor
) -> None:
    """rotation: what q, then the projected rows, needs first; None: nothing."""
    kv, workspace, shape = layer.kv, batch.workspace, batch.shape
    count, num_q_heads, head_dim = out.shape
    _, num_kv_heads, page_size, _ = kv.k.shape
    group = num_q_heads // num_kv_heads
    is_fp8 = kv.k.dtype == FP8
    values = kv.v.view(torch.int16) if is_fp8 else kv.v  # see _from_words
    if is_fp8:  # two tiles of 64 in flight take the shared memory of one
        shape = replace(shape, tile=64, num_warps=max(4, shape.num_warps), num_stages=5)
    stages = shape.num_stages
    fits = head_dim * kv.k.element_size() <= MAX_HEAD_BYTES
    if not fits:  # one tile takes the shared memory of two
        stages = min(stages, 3)
    q_norm = k_norm = cos_sin = q  # pointers that are not read
    eps, normed, shifts = 0.0, False, None
    if rotation is not None:
        cos_sin, eps, shifts = rotation.cos_sin, rotation.eps, rotation.shifts
        if rotation.q_norm is not None and rotation.k_norm is not None:
            q_norm, k_norm, normed = rotation.q_norm, rotation.k_norm, True
    scale_log2, cap_log2 = capped_scale(layer.scale * kv.scales.k, layer.soft_cap)
    arguments = (
        q, q_norm, k_norm, cos_sin, kv.k, values, out, batch.rows, batch.kv_lens, batch.page_table,
        workspace.partial, workspace.lse, workspace.counters, layer.sinks, shifts,
        scale_log2, eps, 1.0 / kv.scales.k, 1.0 / kv.scales.v, kv.scales.v,
        q.stride(0), kv.k.stride(0), kv.k.stride(1), kv.k.stride(2), batch.page_table.stride(0),
    )  # fmt: skip
    common = {
        "TILE": shape.tile, "PAGE_SIZE": page_size, "GROUP": group,
        "GROUP_PADDED": max(16, next_power_of_2(group)), "NUM_Q_HEADS": num_q_heads,
        "NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim, "HEAD_PADDED": next_power_of_2(head_dim),
        "HEADS_MERGED": next_power_of_2(group), "SOFT_CAP": cap_log2, "ROTATE": rotation is not None,
        "NORM": normed, "FP8": is_fp8,
        "LARGEST": largest_number(kv.k.dtype), "NATIVE": kv.k.is_cuda, "AT_ONCE": shape.merged_at_once,
        "num_warps": shape.num_warps, "num_stages": stages, **pdl_options(batch.pdl),
    }  # fmt: skip
    workers, window = shape.workers_of(count, workspace.parts), layer.window or layer.chunk or 0
    if workers and not window:
        balanced_decode_kernel[(num_kv_heads, workers)](
            *arguments, count, MAX_BATCH=workspace.batch_padded, LEAST_TILES=LEAST_TILES,
            WORKERS_PADDED=next_power_of_2(workers), **common,
            **({"maxnreg": shape.registers} if shape.registers else {}),
        )  # fmt: skip
        return
    splits = shape.splits_of(count, workspace.parts)
    decode_kernel[(num_kv_heads, count, splits)](
        *arguments, shape.min_part, NUM_SPLITS=splits, SPLITS_PADDED=next_power_of_2(splits), WINDOW=window,
        CHUNKED=bool(layer.chunk), EARLY=shape.early and fits, **common,
    )  # fmt: skip
