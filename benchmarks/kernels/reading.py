"""A kernel that only reads: the most bytes a second that any kernel can be given."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK, _STEPS = 4096, 8


def read(x: torch.Tensor) -> torch.Tensor:
    """Sums of parts of x, int32, contiguous, of a multiple of 32,768 numbers."""
    programs = x.numel() // (_BLOCK * _STEPS)
    out = torch.empty(programs, dtype=torch.int32, device=x.device)
    _read_kernel[(programs,)](x, out, STEPS=_STEPS, BLOCK=_BLOCK, num_warps=8)
    return out


@triton.jit
def _read_kernel(x_ptr, out_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * (STEPS * BLOCK) + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for step in tl.static_range(STEPS):
        total += tl.load(x_ptr + i + step * BLOCK)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))
