"""The `triton` backend: this project's own Triton-language kernels, no package beyond torch.

Serves every power-of-two page size and head sizes to 256, on any GPU that Triton compiles for. Nothing needs planning
on the host: the kernels read lengths and page table on the device, so captured graphs are replayed as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minisgl_backend.attention.base import (
    AttentionBackend,
    AttentionSpec,
    DecodeInputs,
    LayerGroup,
    PrefillInputs,
    QKNormRope,
    WritingBackend,
)
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.kernels.attention.choose import (
    MAX_EARLY_BATCH,
    DecodeShape,
    decode_shape,
    distinct_batches,
    rotation_pays,
)
from minisgl_backend.kernels.attention.decode import DecodeWorkspace, decode_attention, rotating_decode_attention
from minisgl_backend.kernels.attention.prefill import prefill_attention
from minisgl_backend.kernels.device_facts import DeviceFacts


@dataclass(frozen=True)
class _PrefillPlan:
    inputs: PrefillInputs
    max_q_len: int


@dataclass(frozen=True)
class _DecodePlan:
    inputs: DecodeInputs
    shape: DecodeShape


class TritonBackend(WritingBackend):
    """Flash decoding with an in-kernel merge, and a paged FlashAttention-2 prefill."""

    supports_graphs = True

    def __init__(self, spec: AttentionSpec, group: LayerGroup, workspace: DecodeWorkspace | None = None) -> None:
        """`workspace`: for the heads of this group, or more."""
        super().__init__(spec, group)
        self._window, self._chunk = group.window or 0, group.chunk or 0
        self._group = group.num_q_heads // group.num_kv_heads
        self._can_share = group.sees_all and not group.kv.is_fp8
        self._workspace = workspace or _workspace_for(spec, [group])
        facts = DeviceFacts.of(spec.device)
        self._pdl, self._num_sms = facts.dependent_launch, facts.multiprocessors or 1

    @classmethod
    def for_groups(cls, spec: AttentionSpec, groups: Sequence[LayerGroup]) -> list[AttentionBackend]:
        workspace = _workspace_for(spec, groups)
        return [cls(spec, group, workspace) for group in groups]

    def plan_prefill(self, inputs: PrefillInputs) -> _PrefillPlan:
        return _PrefillPlan(inputs, inputs.max_q_len)

    def prefill_into(self, layer: AttentionLayer, q: torch.Tensor, plan: _PrefillPlan, out: torch.Tensor) -> None:
        i = plan.inputs
        prefill_attention(
            q, layer.kv.k, layer.kv.v, i.cu_seqlens_q, i.kv_lens, i.rows, i.page_table, plan.max_q_len, layer.scale,
            window=self._window, chunk=self._chunk, scales=layer.kv.scales, out=out, soft_cap=layer.soft_cap,
            sinks=layer.sinks,
        )  # fmt: skip

    def plan_decode(self, inputs: DecodeInputs) -> _DecodePlan:
        shape = decode_shape(
            inputs.batch_size, self.group.num_kv_heads, self._group, self._num_sms, can_share=self._can_share
        )
        return _DecodePlan(inputs, shape)

    def decode_into(self, layer: AttentionLayer, q: torch.Tensor, plan: _DecodePlan, out: torch.Tensor) -> None:
        i = plan.inputs
        decode_attention(
            q, layer.kv.k, layer.kv.v, i.rows, i.kv_lens, i.page_table, self._workspace, plan.shape, layer.scale,
            out=out, pdl=self._overlaps(plan), window=self._window, chunk=self._chunk, scales=layer.kv.scales,
            soft_cap=layer.soft_cap, sinks=layer.sinks,
        )  # fmt: skip

    def fuses_rope(self, plan: _DecodePlan) -> bool:
        return rotation_pays(plan.inputs.batch_size, self.group.num_kv_heads, self._num_sms)

    def decode_with_rope(
        self, layer: AttentionLayer, qkv: torch.Tensor, rotation: QKNormRope, plan: _DecodePlan
    ) -> torch.Tensor:
        i, kv = plan.inputs, layer.kv
        return rotating_decode_attention(
            qkv, rotation.q_norm, rotation.k_norm, rotation.cos_sin, kv.k, kv.v, i.rows, i.kv_lens, i.page_table,
            self._workspace, plan.shape, layer.scale, rotation.eps, pdl=self._overlaps(plan), window=self._window,
            chunk=self._chunk, scales=kv.scales, soft_cap=layer.soft_cap, sinks=layer.sinks,
        )  # fmt: skip

    def _overlaps(self, plan: _DecodePlan) -> bool:
        return self._pdl and plan.inputs.batch_size <= MAX_EARLY_BATCH

    def decode_batches(self, max_batch: int) -> tuple[int, ...]:
        heads, parts = self.group.num_kv_heads, self._workspace.parts
        return distinct_batches(max_batch, heads, self._group, self._num_sms, self._can_share, parts)


def _workspace_for(spec: AttentionSpec, groups: Sequence[LayerGroup]) -> DecodeWorkspace:
    q_heads, kv_heads = max(one.num_q_heads for one in groups), max(one.num_kv_heads for one in groups)
    return DecodeWorkspace(spec.max_rows, q_heads, kv_heads, max(one.head_dim for one in groups), spec.device)
