"""Attention of transformers' modules: one function, which their attention interface calls with rotated queries, keys
and values.

It is registered once under the name `IMPLEMENTATION`, without a mask function, so that transformers makes no masks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.kernels.torch_ops import store_tokens
from minisgl_backend.layers.context import ForwardContext

IMPLEMENTATION = "minisgl"
_KEY = "_minisgl_calls"  # attribute of each module of a model, by which its attention finds the model's calls


class AttentionCalls:
    """The calls of attention in one forward pass of a model, in their order: call i is layer i of the KV pool.

    A module may attend more than once per pass. `ctx` is that of the running pass; one thread runs a model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers: list[AttentionLayer] = []
        self._ctx: ForwardContext | None = None
        self._next = 0
        for module in model.modules():
            setattr(module, _KEY, self)

    def bind(self, layers: list[AttentionLayer]) -> None:
        """Binds attention to the pool of these layers."""
        self._layers = layers

    def begin(self, ctx: ForwardContext) -> None:
        """Before a forward pass."""
        self._ctx, self._next = ctx, 0

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [num_tokens, num_q_heads, head_dim], key and value with num_kv_heads -> [num_tokens, num_q_heads, size
        of value].

        Values narrower than keys (MLA) are stored padded with zeros.
        """
        if self._ctx is None:
            raise RuntimeError("attention is called outside of a forward pass")
        layer, ctx = self._layers[self._next], self._ctx
        self._next += 1
        size, missing = value.shape[-1], key.shape[-1] - value.shape[-1]
        if missing:
            value = F.pad(value, (0, missing))
        slots = ctx.slots[layer.cache_group]
        store_tokens(layer.kv.k, key, slots, layer.kv.scales.k)
        store_tokens(layer.kv.v, value, slots, layer.kv.scales.v)
        attended = ctx.attention.attend(layer, query.to(value.dtype).contiguous())[..., :size]
        # A module may attend again before it reads what it got (DiffLlama).
        return attended.clone() if ctx.attention.overwrites else attended


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: [1, heads, num_tokens, head_dim] each -> [1, num_tokens, num_q_heads, head_dim].

    Scale, window, soft cap and sinks in `options` are those that `probe` found.
    """
    calls: AttentionCalls = getattr(module, _KEY)
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    return calls.attend(q, k, v)[None], None


def register() -> None:
    """Makes IMPLEMENTATION known to transformers."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend)
