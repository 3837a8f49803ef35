"""The `triton` backend: this project's own Triton-language kernels, no package beyond torch.

Serves every power-of-two page size and head sizes to 256, on any GPU that Triton compiles for. Nothing needs planning
on the host: the kernels read lengths and page table on the device, so captured graphs are replayed as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from minisgl_backend.kernels.attention.calls import PrefillBatch
from minisgl_backend.kernels.attention.choose import (
    MAX_EARLY_BATCH,
    decode_shape,
    distinct_batches,
    rotation_pays,
)
from minisgl_backend.kernels.attention.decode import (
    DecodeBatch,
    DecodeWorkspace,
    decode_attention,
    rotating_decode_attention,
)
from minisgl_backend.kernels.attention.prefill import prefill_attention
from minisgl_backend.kernels.device_facts import DeviceFacts


class TritonBackend(WritingBackend):
    """Flash decoding with an in-kernel merge, and a paged FlashAttention-2 prefill."""

    supports_graphs = True

    def __init__(self, spec: AttentionSpec, group: LayerGroup, workspace: DecodeWorkspace | None = None) -> None:
        """`workspace`: for the heads of this group, or more."""
        super().__init__(spec, group)
        self._group = group.num_q_heads // group.num_kv_heads
        self._can_share = group.sees_all and not group.kv.is_fp8
        self._workspace = workspace or _workspace_for(spec, [group])
        facts = DeviceFacts.of(spec.device)
        self._pdl, self._num_sms = facts.dependent_launch, facts.multiprocessors or 1

    @classmethod
    def for_groups(cls, spec: AttentionSpec, groups: Sequence[LayerGroup]) -> list[AttentionBackend]:
        workspace = _workspace_for(spec, groups)
        return [cls(spec, group, workspace) for group in groups]

    def plan_prefill(self, inputs: PrefillInputs) -> PrefillBatch:
        rows, table, longest = inputs.rows, inputs.page_table, inputs.max_q_len
        return PrefillBatch(inputs.cu_seqlens_q, inputs.kv_lens, rows, table, longest, inputs.causal)

    def prefill_into(self, layer: AttentionLayer, q: torch.Tensor, plan: PrefillBatch, out: torch.Tensor) -> None:
        prefill_attention(q, layer, plan, out)

    def plan_decode(self, inputs: DecodeInputs) -> DecodeBatch:
        batch_size, heads = inputs.batch_size, self.group.num_kv_heads
        shape = decode_shape(batch_size, heads, self._group, self._num_sms, self._can_share, self.group.head_dim)
        pdl = self._pdl and batch_size <= MAX_EARLY_BATCH
        return DecodeBatch(inputs.rows, inputs.kv_lens, inputs.page_table, self._workspace, shape, pdl)

    def decode_into(self, layer: AttentionLayer, q: torch.Tensor, plan: DecodeBatch, out: torch.Tensor) -> None:
        decode_attention(q, layer, plan, out)

    def fuses_rope(self, plan: DecodeBatch) -> bool:
        return rotation_pays(len(plan.rows), self.group.num_kv_heads, self._num_sms)

    def decode_with_rope(
        self, layer: AttentionLayer, qkv: torch.Tensor, rotation: QKNormRope, plan: DecodeBatch
    ) -> torch.Tensor:
        return rotating_decode_attention(qkv, rotation, layer, plan)

    def decode_batches(self, max_batch: int) -> tuple[int, ...]:
        heads, parts = self.group.num_kv_heads, self._workspace.parts
        shares, head_dim = self._can_share, self.group.head_dim
        return distinct_batches(max_batch, heads, self._group, self._num_sms, shares, parts, head_dim)


def _workspace_for(spec: AttentionSpec, groups: Sequence[LayerGroup]) -> DecodeWorkspace:
    q_heads, kv_heads = max(one.num_q_heads for one in groups), max(one.num_kv_heads for one in groups)
    return DecodeWorkspace(spec.max_rows, q_heads, kv_heads, max(one.head_dim for one in groups), spec.device)
