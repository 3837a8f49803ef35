"""What attention kernels do to scores and queries alike: scale, soft cap, sinks, the number format of the cache."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl_backend.kernels.activation import tanh

LOG2_E = 1.4426950408889634


def capped_scale(scale: float, soft_cap: float | None) -> tuple[float, float | None]:
    """(Factor of the scores, SOFT_CAP of the kernels): logits are in base 2, since exp2 is one instruction."""
    if soft_cap is None:
        return scale * LOG2_E, None
    return scale / soft_cap, soft_cap * LOG2_E


@triton.jit
def for_cache(q, FP8: tl.constexpr):
    """Queries in the dtype of the tensor cores, which is float16 for an FP8 cache: float16 represents every FP8 number,
    and one instruction converts two of them, where bfloat16 takes four."""
    if FP8 and q.dtype == tl.bfloat16:
        return q.to(tl.float16)
    else:
        return q


@triton.jit
def capped(scores, SOFT_CAP: tl.constexpr):
    """Soft cap: scores, scaled by `capped_scale` to units of the cap, -> base-2 logits SOFT_CAP * tanh(scores). None:
    unchanged."""
    if SOFT_CAP is not None:
        return SOFT_CAP * tanh(scores)
    else:
        return scores


@triton.jit
def sink_logits(sinks_ptr, head, ok):
    """Attention sinks of the heads as base-2 logits, like all scores here; -inf where not `ok`."""
    return tl.load(sinks_ptr + head, mask=ok, other=-float("inf")) * 1.4426950408889634
