"""The `fa` backend of latents (MLA): FlashAttention-3 (Shah et al., 2024) through sgl-kernel, any page size.

Its kernels take the rotated part of queries and the other one (`qv`) separately, the rotated key as the key and the
latent as the value. It also serves prompts whose keys are expanded in one piece; with several pieces this project's
kernel is used, which accumulates over them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl_backend.attention.base import AttentionSpec, DecodeInputs, LayerGroup
from minisgl_backend.attention.batch_tables import BatchTables
from minisgl_backend.attention.latent.base import Piece
from minisgl_backend.attention.latent.triton_attn import TritonPrefillBackend
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.kernels.attention.calls import Expanded

_PREFILL_HEADS = ((192, 128),)  # of keys and of values


@dataclass(frozen=True)
class _Plan:
    kv_lens: torch.Tensor  # int32 [batch]
    page_table: torch.Tensor  # int32 [batch, pages]
    cu_seqlens_q: torch.Tensor  # int32 [batch + 1]


class FlashAttentionLatentBackend(TritonPrefillBackend):
    supports_graphs = True

    def __init__(self, spec: AttentionSpec, group: LayerGroup) -> None:
        super().__init__(spec, group)
        # Imported here: the package loads compiled code for one GPU generation and fails loudly on others.
        from sgl_kernel.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._decode_kernel, self._prefill_kernel = flash_attn_with_kvcache, flash_attn_varlen_func
        self._serves_prefill = (self.heads.qk_dim, self.heads.v_dim) in _PREFILL_HEADS
        if self._serves_prefill:
            self.compile_prefill()  # for long prefixes: compiling later would stall running streams
        self._one_each = torch.arange(spec.max_rows + 1, dtype=torch.int32, device=spec.device)
        self._tables = BatchTables(spec)

    def attend_expanded(self, layer: AttentionLayer, piece: Piece, of: Expanded) -> None:
        q, expanded, nope_dim = of.q, of.keys_values, self.heads.nope_dim
        if not (piece.is_whole and self._serves_prefill):
            super().attend_expanded(layer, piece, of)
            return
        k = torch.empty((*expanded.shape[:2], self.heads.qk_dim), dtype=q.dtype, device=q.device)
        k[..., :nope_dim] = expanded[..., :nope_dim]
        k[..., nope_dim:] = of.rotated.unsqueeze(1)
        first, last = int(piece.segments_host[0, 0]), int(piece.segments_host[-1, 1])
        attended = self._prefill_kernel(
            q[first:last],
            k,
            expanded[..., nope_dim:],
            cu_seqlens_q=piece.cu_seqlens[0],
            cu_seqlens_k=piece.cu_seqlens[1],
            max_seqlen_q=piece.max_q_len,
            max_seqlen_k=piece.max_kv_len,
            softmax_scale=layer.scale,
            causal=True,
        )
        of.out[first:last] = attended[0] if isinstance(attended, tuple) else attended

    def plan_decode(self, inputs: DecodeInputs) -> _Plan:
        return _Plan(inputs.kv_lens, self._tables.gather(inputs), self._one_each[: inputs.batch_size + 1])

    def attend_latents(self, layer: AttentionLayer, q: torch.Tensor, q_rope: torch.Tensor, plan: _Plan) -> torch.Tensor:
        rank, kept = self.heads.rank, layer.kv.k.transpose(1, 2)  # tokens before the head
        attended: torch.Tensor = self._decode_kernel(
            q=q_rope,
            k_cache=kept[..., rank:],
            v_cache=kept[..., :rank],
            qv=q,
            cache_seqlens=plan.kv_lens,
            page_table=plan.page_table,
            cu_seqlens_q=plan.cu_seqlens_q,
            max_seqlen_q=1,
            softmax_scale=layer.scale,
            causal=True,
        )
        return attended

    def allocate_graph(self, max_batch_size: int) -> None:
        self._tables.allocate(max_batch_size)

    def plan_capture(self, inputs: DecodeInputs) -> _Plan:
        return _Plan(inputs.kv_lens, self._tables.gather_static(inputs), self._one_each[: inputs.batch_size + 1])

    def plan_replay(self, inputs: DecodeInputs) -> None:
        self._tables.gather_static(inputs)
