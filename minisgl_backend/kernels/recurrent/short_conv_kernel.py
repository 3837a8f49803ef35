"""`short_conv` in the Triton language: one launch for all tokens of a step, which captured graphs can hold: it reads
rows, lengths and pages on the device."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl_backend.kernels.launch import cdiv, next_power_of_2
from minisgl_backend.kernels.recurrent.short_conv import ShortConvCall

MOST_CHANNELS, MOST_TOKENS = 256, 8  # of a program
FEW_TOKENS = 64  # of a step, whose programs have one token each: they are bound by latency


@triton.jit(do_not_specialize=["num_tokens"])
def _short_conv(
    bcx,
    weight,
    bias,
    rows,
    ends,
    page_table,
    ring,
    out,
    num_tokens,
    table_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LENGTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists, inside = token < num_tokens, channel < CHANNELS
    mask = exists[:, None] & inside[None, :]
    row = tl.load(rows + token, mask=exists, other=0)
    position = tl.load(ends + token, mask=exists, other=1) - 1
    # int64: a long prompt's projections, and the rings of a pool, have more than 2^31 numbers.
    own = token.to(tl.int64)[:, None] * (3 * CHANNELS) + channel[None, :]
    b, x = tl.load(bcx + own, mask=mask, other=0.0), tl.load(bcx + own + 2 * CHANNELS, mask=mask, other=0.0)
    bx = (b.to(tl.float32) * x.to(tl.float32)).to(out.dtype.element_ty)  # as a ring keeps it
    taps = weight + channel * WIDTH
    mixed = bx.to(tl.float32) * tl.load(taps + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(1, WIDTH):
        has_earlier = exists & (token >= back)
        earlier_row = tl.load(rows + token - back, mask=has_earlier, other=-1)
        earlier_end = tl.load(ends + token - back, mask=has_earlier, other=0)
        in_step = has_earlier & (earlier_row == row) & (earlier_end - 1 == position - back)
        in_ring = exists & (position >= back) & (in_step == 0)
        before = tl.maximum(position - back, 0)
        page = tl.load(page_table + row.to(tl.int64) * table_stride + before // PAGE_SIZE, mask=in_ring, other=0)
        kept = (page.to(tl.int64) * LENGTH + before % LENGTH)[:, None] * CHANNELS + channel[None, :]
        from_ring = tl.load(ring + kept, mask=mask & in_ring[:, None], other=0.0).to(tl.float32)
        of_step = mask & in_step[:, None]
        earlier = own - back * (3 * CHANNELS)
        earlier_b = tl.load(bcx + earlier, mask=of_step, other=0.0)
        earlier_x = tl.load(bcx + earlier + 2 * CHANNELS, mask=of_step, other=0.0)
        earlier_bx = earlier_b.to(tl.float32) * earlier_x.to(tl.float32)
        from_step = earlier_bx.to(out.dtype.element_ty).to(tl.float32)
        tap = tl.load(taps + WIDTH - 1 - back, mask=inside, other=0.0).to(tl.float32)
        mixed += tl.where(in_step[:, None], from_step, from_ring) * tap[None, :]
    if HAS_BIAS:
        mixed += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    c = tl.load(bcx + own + CHANNELS, mask=mask, other=0.0).to(tl.float32)
    outputs = token.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(out + outputs, (mixed * c).to(out.dtype.element_ty), mask=mask)
    has_later = exists & (token + LENGTH < num_tokens)
    later_row = tl.load(rows + token + LENGTH, mask=has_later, other=-1)
    later = tl.load(ends + token + LENGTH, mask=has_later, other=0) - 1
    same_page = later // PAGE_SIZE == position // PAGE_SIZE
    stays = exists & ((later_row != row) | (later != position + LENGTH) | (same_page == 0))
    page = tl.load(page_table + row.to(tl.int64) * table_stride + position // PAGE_SIZE, mask=stays, other=0)
    place = (page.to(tl.int64) * LENGTH + position % LENGTH)[:, None] * CHANNELS + channel[None, :]
    tl.store(ring + place, bx, mask=mask & stays[:, None])


def short_conv(call: ShortConvCall) -> None:
    """See `short_conv.py`; all tensors are contiguous, but for rows of the page table."""
    num_tokens, (channels, width) = len(call.rows), call.weight.shape
    tokens = 1 if num_tokens <= FEW_TOKENS else MOST_TOKENS
    block = min(next_power_of_2(channels), MOST_CHANNELS)
    _short_conv[(cdiv(num_tokens, tokens), cdiv(channels, block))](
        call.bcx,
        call.weight,
        call.bias if call.bias is not None else call.weight,
        call.rows,
        call.ends,
        call.page_table,
        call.ring,
        call.out,
        num_tokens,
        call.page_table.stride(0),
        channels,
        width,
        call.page_size,
        call.ring.shape[1],
        call.bias is not None,
        tokens,
        block,
        num_warps=4,
    )
