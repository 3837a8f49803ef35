"""`reference.conv_prefill` and `gated_norm` in the Triton language, bound by the bytes of their inputs and outputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.launch import cdiv, next_power_of_2
from minisgl_backend.kernels.recurrent.calls import Block, ChunkBatch, ChunkRow, DeltaLayer
from minisgl_backend.kernels.recurrent.parts import silu

_CHANNELS, _TOKENS = 64, 32  # of a program of the convolution; tokens: of a step of its loop
_NUMBERS = 4096  # of a program of the norm


def conv_prefill(x: torch.Tensor, layer: DeltaLayer, batch: ChunkBatch) -> torch.Tensor:
    """As `reference.conv_prefill`; rows of x may be strided."""
    config = layer.config
    channels = config.conv_channels
    out = torch.empty((len(x), channels), dtype=x.dtype, device=x.device)
    if len(batch.blocks):
        _conv_kernel[(cdiv(channels, _CHANNELS), len(batch.blocks))](
            x, out, batch.blocks, batch.sequences, layer.state.conv, layer.conv_weight, x.stride(0),
            C=channels, WIDTH=config.conv_width, COLUMNS=len(Block._fields),
            ROW_COLUMNS=len(ChunkRow._fields), CHANNELS=_CHANNELS, TOKENS=_TOKENS, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _conv_kernel(
    x_ptr, out_ptr, blocks_ptr, rows_ptr, conv_ptr, weight_ptr, x_stride, C: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROW_COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    blocks_ptr += tl.program_id(1) * COLUMNS
    rows_ptr += tl.load(blocks_ptr) * ROW_COLUMNS
    token = tl.load(blocks_ptr + 1)
    length = tl.load(blocks_ptr + 2)
    before = token - tl.load(rows_ptr + 1)  # tokens of the chunk before the block
    source = tl.load(rows_ptr + 4)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    ok = channel < C
    conv_ptr += source.to(tl.int64) * ((WIDTH - 1) * C)
    history = tl.where(source > 0, WIDTH - 1, 0)  # tokens before the chunk
    x_ptr += token.to(tl.int64) * x_stride
    out_ptr += token.to(tl.int64) * C
    for start in tl.range(0, length, TOKENS):
        i = start + tl.arange(0, TOKENS)
        i_ok = i < length
        total = tl.zeros([TOKENS, CHANNELS], tl.float32)
        for tap in tl.static_range(WIDTH):
            at = i - (WIDTH - 1 - tap)
            new_ok = (i_ok & (at + before >= 0))[:, None] & ok[None, :]
            raw = tl.load(x_ptr + at[:, None] * x_stride + channel[None, :], mask=new_ok, other=0.0)
            if tap < WIDTH - 1:
                old_ok = (i_ok & (at + before < 0) & (at + before >= -history))[:, None] & ok[None, :]
                old_at = (WIDTH - 1 + at + before)[:, None] * C
                raw += tl.load(conv_ptr + old_at + channel[None, :], mask=old_ok, other=0.0)
            weight = tl.load(weight_ptr + tap * C + channel, mask=ok, other=0.0).to(tl.float32)
            total += raw.to(tl.float32) * weight[None, :]
        out = silu(total).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + i[:, None] * C + channel[None, :], out, mask=i_ok[:, None] & ok[None, :])


def gated_norm(o: torch.Tensor, x: torch.Tensor, layer: DeltaLayer, out: torch.Tensor | None = None) -> torch.Tensor:
    """As `reference.gated_norm`; o contiguous, rows of x may be strided."""
    config = layer.config
    out = x.new_empty((len(x), config.num_v_heads * config.v_dim)) if out is None else out
    padded = next_power_of_2(config.v_dim)
    heads = max(1, _NUMBERS // padded)  # of a program, of tokens one after the other
    count = len(x) * config.num_v_heads
    if count:
        _norm_kernel[(cdiv(count, heads),)](
            o, x, out, layer.norm_weight, layer.norm_eps, x.stride(0), count, C=config.conv_channels,
            HV=config.num_v_heads, DV=config.v_dim, DV_PADDED=padded, HEADS=heads, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"])
def _norm_kernel(
    o_ptr, x_ptr, out_ptr, norm_ptr, eps, x_stride, count, C: tl.constexpr, HV: tl.constexpr, DV: tl.constexpr,
    DV_PADDED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    e = tl.arange(0, DV_PADDED)
    e_ok = e < DV
    ok = (n < count)[:, None] & e_ok[None, :]
    o = tl.load(o_ptr + n[:, None] * DV + e[None, :], mask=ok, other=0.0).to(tl.float32)
    z_at = (n // HV * x_stride + C + n % HV * DV)[:, None] + e[None, :]
    z = tl.load(x_ptr + z_at, mask=ok, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + e, mask=e_ok, other=0.0).to(tl.float32)
    number: tl.constexpr = out_ptr.dtype.element_ty
    normed = o * tl.rsqrt(tl.sum(o * o, 1) / DV + eps)[:, None] * weight[None, :]
    out = normed.to(number).to(tl.float32) * silu(z)
    tl.store(out_ptr + n[:, None] * DV + e[None, :], out.to(number), mask=ok)
