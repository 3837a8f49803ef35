"""The law of a ragged batch: a token's hidden state depends on its own sequence and position, and on nothing beside it.

Attention is the only place where tokens may meet. A module that mixes them elsewhere (a convolution, a token shift, a
router with a capacity), or that counts rows of the batch instead of reading `position_ids`, would give wrong answers in
silence; this finds it.
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
_COARSE = 5e-2  # of 16-bit formats


class _OwnTokenOnly(AttentionCalls):
    """Attention in which each token sees itself alone, and that shows what its queries and keys are."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group, size = query.shape[1] // key.shape[1], value.shape[-1]
        keys, values = (one.repeat_interleave(group, dim=1) for one in (key, value))
        return values + torch.tanh(query + keys)[..., :size]


@torch.inference_mode()
def mixes_tokens(model: PreTrainedModel, base: nn.Module, vocab_size: int) -> bool:
    """Whether the second of two tokens changes when the first is not there. Attention is to be bound afterwards.

    Several pairs must say so: with one of them, rounding alone (GEMMs of one and of two rows are different kernels in
    16 bits) can give a token other experts.
    """
    calls = _OwnTokenOnly(model)
    return all(_changes(model, base, calls, vocab_size // part) for part in (2, 3, 5))


def _changes(model: PreTrainedModel, base: nn.Module, calls: _OwnTokenOnly, token: int) -> bool:
    device = next(model.parameters()).device
    tokens = torch.tensor([[token // 2, token]], device=device)
    positions = torch.tensor([_POSITIONS], device=device)

    def hidden(first: int) -> torch.Tensor:
        calls.begin(cast(ForwardContext, None))  # which this attention does not ask for
        inputs = {"input_ids": tokens[:, first:], "position_ids": positions[:, first:]}
        states: torch.Tensor = base(**inputs, use_cache=False, return_dict=True)[0][0, -1]
        return states.float()

    together, alone = hidden(0), hidden(1)
    tolerance = _TOLERANCE.get(next(model.parameters()).dtype, _COARSE)
    return not torch.allclose(together, alone, rtol=0.0, atol=tolerance * float(alone.abs().max()), equal_nan=True)
