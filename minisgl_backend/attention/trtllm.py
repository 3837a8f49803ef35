"""The `trtllm` backend: TensorRT-LLM's fused attention as FlashInfer exposes it; pages of 16, 32 or 64 tokens.

Decode is XQA on Hopper and trtllm-gen on Blackwell; prefill has kernels on Blackwell only, so on Hopper this backend
serves as the second of a pair (`fa,trtllm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minisgl_backend.attention.base import AttentionBackend, AttentionSpec, DecodeInputs, LayerGroup, PrefillInputs
from minisgl_backend.attention.batch_tables import BatchTables
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.errors import ConfigError

_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class _Plan:
    kv_lens: torch.Tensor  # int32 [num_seqs]
    page_table: torch.Tensor  # int32 [num_seqs, pages]
    cu_seqlens_q: torch.Tensor | None = None  # int32 [num_seqs + 1]
    cu_seqlens_kv: torch.Tensor | None = None  # int32 [num_seqs + 1]
    max_q_len: int = 1
    max_kv_len: int = 0


class TrtllmBackend(AttentionBackend):
    """The kernels read lengths and pages on the device; only the batch's rows of the page table are gathered."""

    supports_graphs = True

    def __init__(self, spec: AttentionSpec, group: LayerGroup, workspace: torch.Tensor | None = None) -> None:
        """`workspace`: uint8 [_WORKSPACE_BYTES], zeros."""
        super().__init__(spec, group)
        if spec.page_size not in (16, 32, 64):
            raise ConfigError(f"attention_backend trtllm serves page_size 16, 32 and 64, not {spec.page_size}")
        import flashinfer

        self._flashinfer = flashinfer
        self._workspace = _zeros(spec) if workspace is None else workspace
        self._window_left = -1 if group.window is None else group.window - 1
        self._tables = BatchTables(spec)

    @classmethod
    def for_groups(cls, spec: AttentionSpec, groups: Sequence[LayerGroup]) -> list[AttentionBackend]:
        workspace = _zeros(spec)
        return [cls(spec, group, workspace) for group in groups]

    def plan_prefill(self, inputs: PrefillInputs) -> _Plan:
        cu_seqlens_kv = torch.nn.functional.pad(inputs.kv_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return _Plan(
            inputs.kv_lens, self._tables.gather(inputs), inputs.cu_seqlens_q, cu_seqlens_kv, inputs.max_q_len,
            int(inputs.kv_lens_host.max()),
        )  # fmt: skip

    def prefill(self, layer: AttentionLayer, q: torch.Tensor, plan: _Plan) -> torch.Tensor:
        out: torch.Tensor = self._flashinfer.prefill.trtllm_batch_context_with_kv_cache(
            q.contiguous(), (layer.kv.k, layer.kv.v), self._workspace, plan.page_table, plan.kv_lens, plan.max_q_len,
            plan.max_kv_len, layer.scale * layer.kv.scales.k, layer.kv.scales.v, plan.kv_lens.shape[0],
            plan.cu_seqlens_q, plan.cu_seqlens_kv, window_left=self._window_left, kv_layout="HND",
        )  # fmt: skip
        return out

    def plan_decode(self, inputs: DecodeInputs) -> _Plan:
        return _Plan(inputs.kv_lens, self._tables.gather(inputs), max_kv_len=int(inputs.kv_lens_host.max()))

    def decode(self, layer: AttentionLayer, q: torch.Tensor, plan: _Plan) -> torch.Tensor:
        out: torch.Tensor = self._flashinfer.decode.trtllm_batch_decode_with_kv_cache(
            q.contiguous(), (layer.kv.k, layer.kv.v), self._workspace, plan.page_table, plan.kv_lens, plan.max_kv_len,
            bmm1_scale=layer.scale * layer.kv.scales.k, bmm2_scale=layer.kv.scales.v,
            window_left=self._window_left, kv_layout="HND",
        )  # fmt: skip
        return out

    def allocate_graph(self, max_batch_size: int) -> None:
        self._tables.allocate(max_batch_size)

    def plan_capture(self, inputs: DecodeInputs) -> _Plan:
        return _Plan(inputs.kv_lens, self._tables.gather_static(inputs), max_kv_len=self.spec.max_seq_len)

    def plan_replay(self, inputs: DecodeInputs) -> None:
        self._tables.gather_static(inputs)


def _zeros(spec: AttentionSpec) -> torch.Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)
