"""The `fa` backend: FlashAttention through sgl-kernel (FA3 on Hopper, FA2 kernels where the package has them).

Every page size works; the kernels take the head-major pool through a transposed view. FlashAttention-3: Shah et al.,
2024.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from minisgl_backend.attention.base import (
    AttentionBackend,
    AttentionSpec,
    DecodeInputs,
    LayerGroup,
    PrefillInputs,
    PromptInputs,
)
from minisgl_backend.attention.batch_tables import BatchTables
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.kv.layout import FP8

_LARGEST = torch.finfo(FP8).max


def serves_sinks() -> bool:
    """Whether the installed kernels support attention sinks."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    return "sinks" in inspect.signature(flash_attn_with_kvcache).parameters


@dataclass(frozen=True)
class _Plan:
    kv_lens: torch.Tensor  # int32 [num_seqs]
    page_table: torch.Tensor  # int32 [num_seqs, pages]
    cu_seqlens_q: torch.Tensor  # int32 [num_seqs + 1]
    max_q_len: int
    num_splits: int = 0  # 0: the kernel chooses
    causal: bool = True


class FlashAttentionBackend(AttentionBackend):
    """One variable-length kernel serves prefill and decode; decode has one query token per sequence."""

    supports_graphs = True

    def __init__(self, spec: AttentionSpec, group: LayerGroup) -> None:
        super().__init__(spec, group)
        # Imported here: the package loads compiled code for one GPU generation and fails on others.
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        self._kernel = flash_attn_with_kvcache
        # Older kernels take no `out`, and the output of FP8 attention is bfloat16.
        same_type = group.kv.dtype != FP8 or spec.dtype == torch.bfloat16
        self._writes_out = same_type and "out" in inspect.signature(flash_attn_with_kvcache).parameters
        self._window = (-1, -1) if group.window is None else (group.window - 1, 0)
        self._one_each = torch.arange(spec.max_rows + 1, dtype=torch.int32, device=spec.device)
        self._tables = BatchTables(spec)
        self._scales: dict[float, torch.Tensor] = {}

    def plan_prefill(self, inputs: PrefillInputs) -> _Plan:
        tables = self._tables.gather(inputs)
        return _Plan(inputs.kv_lens, tables, inputs.cu_seqlens_q, inputs.max_q_len, causal=inputs.causal)

    def prefill(self, layer: AttentionLayer, q: torch.Tensor, plan: _Plan) -> torch.Tensor:
        return self._attend(layer, q, plan).to(self.spec.dtype)

    def prefill_into(self, layer: AttentionLayer, q: torch.Tensor, plan: _Plan, out: torch.Tensor) -> None:
        if self._writes_out:
            self._attend(layer, q, plan, out=out)
        else:
            super().prefill_into(layer, q, plan, out)

    def _attend(self, layer: AttentionLayer, q: torch.Tensor, plan: _Plan, **more: Any) -> torch.Tensor:
        if layer.kv.k.dtype == FP8:
            # The kernel multiplies FP8 with FP8, so queries are quantized, too, as are the softmax weights inside.
            q = q.clamp(-_LARGEST, _LARGEST).to(FP8)
            heads = (len(plan.kv_lens), self.group.num_kv_heads)
            more |= {
                "k_descale": self._descale(layer.kv.scales.k, heads),
                "v_descale": self._descale(layer.kv.scales.v, heads),
            }
        if layer.soft_cap is not None:
            more["softcap"] = layer.soft_cap
        if layer.sinks is not None:
            more["sinks"] = layer.sinks.to(torch.bfloat16)  # the only format that the kernels take
        attended: torch.Tensor = self._kernel(
            q,
            layer.kv.k.transpose(1, 2),
            layer.kv.v.transpose(1, 2),
            cache_seqlens=plan.kv_lens,
            page_table=plan.page_table,
            cu_seqlens_q=plan.cu_seqlens_q,
            max_seqlen_q=plan.max_q_len,
            softmax_scale=layer.scale,
            causal=plan.causal,
            window_size=self._window if plan.causal or self._window[0] < 0 else (self._window[0], -1),
            num_splits=plan.num_splits,
            **more,
        )
        return attended

    def _descale(self, scale: float, shape: tuple[int, int]) -> torch.Tensor:
        """float32 [num_seqs, num_kv_heads], all the same number."""
        one = self._scales.get(scale)
        if one is None:
            one = self._scales[scale] = torch.full((1, 1), scale, dtype=torch.float32, device=self.spec.device)
        return one.expand(shape)

    def plan_decode(self, inputs: DecodeInputs) -> _Plan:
        return _Plan(inputs.kv_lens, self._tables.gather(inputs), self._one_each[: inputs.batch_size + 1], 1)

    def decode(self, layer: AttentionLayer, q: torch.Tensor, plan: _Plan) -> torch.Tensor:
        return self.prefill(layer, q, plan)

    def allocate_graph(self, max_batch_size: int) -> None:
        self._tables.allocate(max_batch_size)

    def plan_capture(self, inputs: DecodeInputs) -> _Plan:
        return _Plan(inputs.kv_lens, self._tables.gather_static(inputs), self._one_each[: inputs.batch_size + 1], 1)

    def plan_replay(self, inputs: DecodeInputs) -> None:
        self._tables.gather_static(inputs)

    @property
    def captures_prompts(self) -> bool:
        return self._writes_out  # otherwise the rows of padding tokens would be overwritten with garbage

    def plan_prompt(self, inputs: PromptInputs) -> _Plan:
        # Splits would take memory for the number of parts of the longest possible prompt.
        return _Plan(inputs.kv_lens, inputs.page_table, inputs.cu_seqlens_q, inputs.num_tokens, num_splits=1)
