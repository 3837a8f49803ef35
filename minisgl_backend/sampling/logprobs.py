"""Log-probabilities of given tokens and of the most likely ones, from raw logits."""

from __future__ import annotations

import numpy as np
import torch

from minisgl_backend.arrays import Int32Array
from minisgl_backend.step import Logprobs

SLAB_ELEMENTS = 1 << 24  # logits processed at once; bounds the memory that large vocabularies need
PROMPT_SLAB = 256  # prompt positions whose logits exist at once


def pack(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> torch.Tensor:
    """All that an answer with log-probabilities needs, in one int32 tensor [n, 3 + 2 * top]: one copy to the host.

    logits [n, vocab_size], token_ids [n]. Columns: the token, its log-probability (float32 bits), its
    rank, the `top` most likely token ids, their log-probabilities (bits).
    """
    step = max(1, SLAB_ELEMENTS // logits.shape[1])
    slabs = [
        _pack_slab(logits[start : start + step].float(), token_ids[start : start + step].long(), top)
        for start in range(0, len(logits), step)
    ]
    return slabs[0] if len(slabs) == 1 else torch.cat(slabs)


def unpack(row: Int32Array, top: int) -> Logprobs:
    """One row of `pack`'s result, cut down to `top` alternatives."""
    packed_top = (len(row) - 3) // 2
    floats = row.view(np.float32)
    return Logprobs(
        token_id=int(row[0]),
        logprob=float(floats[1]),
        rank=int(row[2]),
        top_ids=tuple(row[3 : 3 + top].tolist()),
        top=tuple(floats[3 + packed_top : 3 + packed_top + top].tolist()),
    )


def _pack_slab(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> torch.Tensor:
    total = torch.logsumexp(logits, dim=1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    rank = (logits > chosen).sum(dim=1, keepdim=True, dtype=torch.int32) + 1
    columns = [token_ids.unsqueeze(1).to(torch.int32), (chosen - total).view(torch.int32), rank]
    if top:
        # Of equal logits the lower token id comes first, which topk alone does not guarantee.
        keys, _ = torch.topk(order_keys(logits), min(top, logits.shape[1]), dim=1)
        ids = key_token_ids(keys)
        columns += [ids, (logits.gather(1, ids.long()) - total).view(torch.int32)]
    return torch.cat(columns, dim=1)


def order_keys(logits: torch.Tensor) -> torch.Tensor:
    """int64 [n, vocab_size] keys that order tokens by logit (float32); of equal logits the lower id is the greater."""
    bits = logits.view(torch.int32)
    bits = torch.where(logits == 0, 0, bits)  # -0.0 and 0.0 are equal
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], dtype=torch.int64, device=logits.device)
    return (order.to(torch.int64) << 31) | (0x7FFFFFFF - ids)


def key_token_ids(keys: torch.Tensor) -> torch.Tensor:
    """The token ids of `order_keys`' result; int32."""
    return (0x7FFFFFFF - (keys & 0x7FFFFFFF)).to(torch.int32)
