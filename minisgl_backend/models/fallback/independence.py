"""Checks the requirement of ragged batches: a token's hidden state only depends on its own sequence and position.

Tokens may only interact in attention. A module that mixes them elsewhere (a convolution, a token shift, a router with a
capacity), or that counts rows of the batch instead of reading `position_ids`, would silently give wrong answers; this
finds it.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.models.fallback.attention import AttentionCalls

_POSITIONS = (4, 7)
_TOLERANCE = {torch.float32: 1e-3}
_COARSE = 5e-2  # for 16-bit dtypes


class _OwnTokenOnly(AttentionCalls):
    """Attention in which each token only sees itself, with an output that depends on its query and key."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group, size = query.shape[1] // key.shape[1], value.shape[-1]
        keys, values = (one.repeat_interleave(group, dim=1) for one in (key, value))
        return values + torch.tanh(query + keys)[..., :size]


@torch.inference_mode()
def mixes_tokens(model: PreTrainedModel, base: nn.Module, vocab_size: int) -> bool:
    """Whether the second of two tokens changes when the first is missing. Attention must be bound afterwards.

    Several pairs must agree: in a single one, rounding (GEMMs of one and of two rows use different kernels in 16 bits)
    may change a token's experts.
    """
    calls = _OwnTokenOnly(model)
    return all(_changes(model, base, calls, vocab_size // part) for part in (2, 3, 5))


def _changes(model: PreTrainedModel, base: nn.Module, calls: _OwnTokenOnly, token: int) -> bool:
    device = next(model.parameters()).device
    tokens = torch.tensor([[token // 2, token]], device=device)
    positions = torch.tensor([_POSITIONS], device=device)

    def hidden(first: int) -> torch.Tensor:
        calls.begin(cast(ForwardContext, None))  # not used by this attention
        inputs = {"input_ids": tokens[:, first:], "position_ids": positions[:, first:]}
        states: torch.Tensor = base(**inputs, use_cache=False, return_dict=True)[0][0, -1]
        return states.float()

    together, alone = hidden(0), hidden(1)
    tolerance = _TOLERANCE.get(next(model.parameters()).dtype, _COARSE)
    return not torch.allclose(together, alone, rtol=0.0, atol=tolerance * float(alone.abs().max()), equal_nan=True)
