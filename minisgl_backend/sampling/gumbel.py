"""The noise of sampling: random numbers that depend on (seed, position, token id) and nothing else.

A sequence samples the same tokens whatever else is in its batch, after a preemption, and on any number of ranks.
Sampling uses the Gumbel-max trick: argmax(logit / temperature + gumbel) has the softmax's distribution. The hash is
counter-based and uses 32-bit operations only, so that a kernel can compute the same noise in registers:

    a    = mix(seed_low ^ mix(position * GOLDEN + 1))           once a row
    key0 = mix(a ^ seed_high)                                   once a row
    key1 = mix(key0 + GOLDEN)                                   once a row
    h    = token_id * GOLDEN ^ key0;  h ^= h >> 16;  h *= M0;  h ^= key1;  h ^= h >> 15;  h *= M1;  h ^= h >> 16
    v    = min((float32(h & 0x7fffffff) + 0.5) * 2**-31, 1 - 2**-24)
    gumbel = -log(-log1p(-v))

`mix` is the same sequence without key1 and the first multiplication (the lowbias32 permutation of Chris Wellons).
"""

from __future__ import annotations

import torch

GOLDEN = 0x9E3779B9 - 2**32  # the odd integer nearest 2**32 / golden ratio, as int32
M0 = 0x7FEB352D
M1 = 0x846CA68B - 2**32
LARGEST_UNIFORM = 1.0 - 2.0**-24


def row_keys(
    seed_low: torch.Tensor, seed_high: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two int32 keys [n] for the tokens at `positions` [n]; all arguments are int32."""
    a = _mix(seed_low ^ _mix(positions * GOLDEN + 1))
    key0 = _mix(a ^ seed_high)
    return key0, _mix(key0 + GOLDEN)


def gumbel(key0: torch.Tensor, key1: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 [n, m], for int32 keys [n] and token ids [m] or [n, m]."""
    hashed = (token_ids * GOLDEN) ^ key0.unsqueeze(1)
    _xor_shift(hashed, 16)
    hashed *= M0
    hashed ^= key1.unsqueeze(1)
    _xor_shift(hashed, 15)
    hashed *= M1
    _xor_shift(hashed, 16)
    # 31 bits keep the resolution where it matters: near 0, where the winners of a large vocabulary are.
    noise = hashed.bitwise_and_(0x7FFFFFFF).to(torch.float32)
    noise.add_(0.5).mul_(2.0**-31).clamp_(max=LARGEST_UNIFORM)
    return noise.neg_().log1p_().neg_().log_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    _xor_shift(x, 16)
    x *= M0
    _xor_shift(x, 15)
    x *= M1
    _xor_shift(x, 16)
    return x


def _xor_shift(x: torch.Tensor, bits: int) -> None:
    """x ^= x >> bits in place, with a logical (unsigned) shift."""
    x ^= (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)
