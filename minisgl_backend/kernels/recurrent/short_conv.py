"""The gated short convolution of a step's tokens, between two projections: y = C * conv(B * x).

The convolution reads B * x of the `width` - 1 tokens before a token: those of the step from the step, others from the
rings of their pages, in which each token leaves its own. One launch does both. That is sound since

* a row's tokens follow each other in the step, so that only its first `width` - 1 tokens read rings at all;
* a prompt chunk begins with a page: what it reads is in pages before those that it writes;
* of a decoding row's next token and its drafts, at most `ring length` - `width`, none takes the place of one of the
  `width` - 1 vectors before them, and what a rejected draft leaves is overwritten before it is read;
* of tokens whose place in a ring is the same, only the last in the step is kept, and no chunk goes on within a page.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch

from minisgl_backend.kernels.candidate import on_cpu, on_gpu
from minisgl_backend.kernels.ops import Ops


class ShortConvCall(NamedTuple):
    """One layer of one step, on one rank."""

    bcx: torch.Tensor  # [num_tokens, 3 * channels]: B, C and x of each token, one after the other
    weight: torch.Tensor  # [channels, width]; the last is the token's own
    bias: torch.Tensor | None  # [channels]
    rows: torch.Tensor  # int32 [num_tokens]; a row's tokens follow each other
    ends: torch.Tensor  # int32 [num_tokens]; position + 1
    page_table: torch.Tensor  # int32 [max_rows, columns]
    page_size: int  # tokens
    ring: torch.Tensor  # [num_pages, length, channels]; position p is at p % length of its page
    out: torch.Tensor  # [num_tokens, channels]


ShortConvKernel = Callable[[ShortConvCall], None]


def choose_short_conv(ops: Ops) -> ShortConvKernel:
    """The implementation that goes with the `Ops` of a device."""
    if ops.facts is not None and on_cpu(ops.facts):
        from minisgl_backend.kernels.cpu import recurrent

        return recurrent.short_conv
    if ops.facts is None or not on_gpu(ops.facts) or importlib.util.find_spec("triton") is None:
        return short_conv_in_torch
    from minisgl_backend.kernels.recurrent.short_conv_kernel import short_conv

    return short_conv


def short_conv_in_torch(call: ShortConvCall) -> None:
    """On any device, in float32; the reference of other implementations."""
    b, c, x = call.bcx.chunk(3, dim=1)
    bx, width, length = b * x, call.weight.shape[1], call.ring.shape[1]
    positions, rows = call.ends - 1, call.rows
    token = torch.arange(len(rows), device=rows.device)
    mixed = bx.float() * call.weight[:, -1].float()
    for back in range(1, width):
        earlier, before = (token - back).clamp(min=0), (positions - back).clamp(min=0)
        in_step = (token >= back) & (rows[earlier] == rows) & (positions[earlier] == positions - back)
        pages = call.page_table[rows, before // call.page_size]
        vectors = torch.where(in_step[:, None], bx[earlier], call.ring[pages, before % length])
        vectors = vectors.masked_fill((positions < back)[:, None], 0.0)  # a select: a ring may hold anything
        mixed = mixed + vectors.float() * call.weight[:, width - 1 - back].float()
    if call.bias is not None:
        mixed = mixed + call.bias.float()
    pages = call.page_table[rows, positions // call.page_size]
    later = (token + length).clamp(max=len(rows) - 1)
    follows = (token + length < len(rows)) & (rows[later] == rows) & (positions[later] == positions + length)
    follows &= (positions + length) // call.page_size == positions // call.page_size
    # What is not kept goes to the padding page, which nobody reads.
    call.ring[torch.where(follows, 0, pages), positions % length] = bx
    call.out.copy_(mixed * c.float())
