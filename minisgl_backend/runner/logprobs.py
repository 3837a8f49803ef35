"""Log-probabilities of given tokens and of the most likely ones, from raw logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from minisgl_backend.step import Logprobs

SLAB_ELEMENTS = 1 << 24  # logits handled at once; bounds the memory of large vocabularies
PROMPT_SLAB = 256  # prompt positions whose logits exist at once


def pack(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> torch.Tensor:
    """What is needed to answer, in one int32 tensor [n, 3 + 2 * top], so that it comes back in one copy.

    logits [n, vocab_size], token_ids [n]. Columns: the token, its log-probability (float32 bits), its
    rank, the `top` most likely token ids, their log-probabilities (bits).
    """
    step = max(1, SLAB_ELEMENTS // logits.shape[1])
    slabs = [
        _pack_slab(logits[start : start + step].float(), token_ids[start : start + step].long(), top)
        for start in range(0, len(logits), step)
    ]
    return slabs[0] if len(slabs) == 1 else torch.cat(slabs)


def unpack(line: npt.NDArray[np.int32], top: int) -> Logprobs:
    """One line of what `pack` made, cut down to `top` alternatives."""
    packed_top = (len(line) - 3) // 2
    floats = line.view(np.float32)
    return Logprobs(
        token_id=int(line[0]),
        logprob=float(floats[1]),
        rank=int(line[2]),
        top_ids=tuple(line[3 : 3 + top].tolist()),
        top=tuple(floats[3 + packed_top : 3 + packed_top + top].tolist()),
    )


def _pack_slab(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> torch.Tensor:
    total = torch.logsumexp(logits, dim=1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    rank = (logits > chosen).sum(dim=1, keepdim=True, dtype=torch.int32) + 1
    columns = [token_ids.unsqueeze(1).to(torch.int32), (chosen - total).view(torch.int32), rank]
    if top:
        values, ids = torch.topk(logits, min(top, logits.shape[1]), dim=1)
        columns += [ids.to(torch.int32), (values - total).view(torch.int32)]
    return torch.cat(columns, dim=1)
