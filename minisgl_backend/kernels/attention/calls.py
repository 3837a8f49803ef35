"""Arguments of attention kernels that belong together."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Expanded(NamedTuple):
    """Queries of a step; keys and values that were expanded from some of its latents (MLA); and the result over earlier
    ones, into which that over these is merged. All but `q` are contiguous."""

    q: torch.Tensor  # [num_tokens, num_q_heads, nope_dim + rope_dim]
    keys_values: torch.Tensor  # [num_keys, num_q_heads, nope_dim + v_dim]
    rotated: torch.Tensor  # [num_keys, rope_dim], the rest of the keys
    out: torch.Tensor  # [num_tokens, num_q_heads, v_dim]
    lse: torch.Tensor  # float32 [num_tokens, num_q_heads]: log-sum-exp of the scores so far, in base 2
