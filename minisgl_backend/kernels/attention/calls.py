"""Arguments of attention kernels that belong together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from minisgl_backend.kv.layout import LayerKV


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedLayer:
    """What attention kernels need of a layer: constants, and its keys and values (or latents) in the pool."""

    kv: LayerKV
    scale: float  # of the scores
    window: int | None = None  # tokens that a query sees, including itself; None: all up to itself
    chunk: int | None = None  # tokens; a query sees those of its own chunk, up to itself; None: of all
    soft_cap: float | None = None  # scores become soft_cap * tanh(scores / soft_cap), before the mask
    sinks: torch.Tensor | None = None  # float32 [num_q_heads]: logits that take part in the softmax and have no value


class PrefillBatch(NamedTuple):
    """A step's prefill part, made once for all layers of a group. Sequence i owns queries cu_seqlens_q[i] to
    cu_seqlens_q[i+1], the last of its kv_lens[i] cached tokens."""

    cu_seqlens_q: torch.Tensor  # int32 [num_seqs + 1]
    kv_lens: torch.Tensor  # int32 [num_seqs]
    rows: torch.Tensor  # int32 [num_seqs]; of the page table
    page_table: torch.Tensor  # int32 [max_rows, max_pages]
    max_q_len: int  # queries of the sequence that has the most
    causal: bool = True  # False: a query sees all kv_lens tokens; windows bound those before it


class Expanded(NamedTuple):
    """Queries of a step; keys and values that were expanded from some of its latents (MLA); and the result over earlier
    ones, into which that over these is merged. All but `q` are contiguous."""

    q: torch.Tensor  # [num_tokens, num_q_heads, nope_dim + rope_dim]
    keys_values: torch.Tensor  # [num_keys, num_q_heads, nope_dim + v_dim]
    rotated: torch.Tensor  # [num_keys, rope_dim], the rest of the keys
    out: torch.Tensor  # [num_tokens, num_q_heads, v_dim]
    lse: torch.Tensor  # float32 [num_tokens, num_q_heads]: log-sum-exp of the scores so far, in base 2
