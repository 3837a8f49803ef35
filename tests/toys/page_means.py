"""A toy of what a page holds as a whole: attention that sees the tokens of its own page, and of each page before it
only the mean of its keys and of its values, which the page has beside its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minisgl_backend.attention.base import AttentionBackend, DecodeInputs, PrefillInputs
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.kv.layout import KVScales, LayerKV, MHALayout, PagePart


@dataclass(frozen=True)
class MeansKV(LayerKV):
    k_means: torch.Tensor | None = None  # [num_pages, num_kv_heads, head_dim]
    v_means: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PageMeansLayout(MHALayout):
    """Keys and values, then a mean of each, however many tokens the page has."""

    def parts(self, page_size: int) -> tuple[PagePart, ...]:
        mean = PagePart((self.num_kv_heads, self.head_dim), self.dtype)
        return (*super().parts(page_size), mean, mean)

    def layer(self, tensors: Sequence[torch.Tensor], scales: KVScales) -> LayerKV:
        keys, values, k_means, v_means = tensors
        return MeansKV(keys, values, scales, k_means, v_means)


class PageMeansBackend(AttentionBackend):
    """Token by token."""

    def plan_prefill(self, inputs: PrefillInputs) -> PrefillInputs:
        return inputs

    def plan_decode(self, inputs: DecodeInputs) -> DecodeInputs:
        return inputs

    def prefill(self, layer: AttentionLayer, q: torch.Tensor, plan: PrefillInputs) -> torch.Tensor:
        tokens = zip(q.split(plan.cu_seqlens_q.diff().tolist()), plan.rows, plan.kv_lens.tolist(), strict=True)
        return torch.cat([self._attend(layer, part, plan.page_table[row], length) for part, row, length in tokens])

    def decode(self, layer: AttentionLayer, q: torch.Tensor, plan: DecodeInputs) -> torch.Tensor:
        tokens = zip(q.split(1), plan.rows, plan.kv_lens.tolist(), strict=True)
        return torch.cat([self._attend(layer, part, plan.page_table[row], length) for part, row, length in tokens])

    def _attend(self, layer: AttentionLayer, q: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
        """The last of a row's `length` tokens; q [num_tokens, num_q_heads, head_dim], pages int32 [columns]."""
        kv, size, first = layer.kv, self.spec.page_size, length - len(q)
        assert isinstance(kv, MeansKV)
        assert kv.k_means is not None
        assert kv.v_means is not None
        for column in range(first // size, -(-length // size)):
            page, filled = int(pages[column]), min(size, length - column * size)
            kv.k_means[page], kv.v_means[page] = kv.k[page, :, :filled].mean(1), kv.v[page, :, :filled].mean(1)
        out = torch.empty_like(q)
        for token in range(len(q)):
            column, offset = divmod(first + token, size)
            before, own = pages[:column].long(), int(pages[column])
            keys, values = (
                torch.cat([means[before].transpose(0, 1), tokens[own, :, : offset + 1]], 1)
                for means, tokens in ((kv.k_means, kv.k), (kv.v_means, kv.v))
            )
            queries = q[token].view(layer.num_kv_heads, -1, layer.head_dim)
            scores = (queries @ keys.transpose(1, 2) * layer.scale).softmax(-1)
            out[token] = (scores @ values).flatten(0, 1)
        return out
