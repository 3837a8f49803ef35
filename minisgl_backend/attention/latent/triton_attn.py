"""The `triton` backend of latents (MLA): this project's own Triton-language kernels, any page size, no package."""

from __future__ import annotations

from functools import partial

import torch

from minisgl_backend.attention.base import AttentionSpec, DecodeInputs, LayerGroup, Plan
from minisgl_backend.attention.latent.base import LatentBackend, Piece
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.kernels.attention.calls import Expanded
from minisgl_backend.kernels.attention.choose import MAX_EARLY_BATCH
from minisgl_backend.kernels.attention.latent_decode import (
    LatentDecodeBatch,
    LatentDecodeWorkspace,
    distinct_latent_batches,
    latent_decode_attention,
    latent_decode_shape,
)
from minisgl_backend.kernels.attention.latent_prefill import SHORT, latent_prefill_attention
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.shared_memory import shared_memory


class TritonPrefillBackend(LatentBackend):
    """Prefill of backends that only have a decode kernel of their own."""

    def attend_expanded(self, layer: AttentionLayer, piece: Piece, of: Expanded) -> None:
        latent_prefill_attention(of, piece.segments, piece.max_q_len, layer.scale)

    def compile_prefill(self) -> None:
        """Compiles the kernels of short and of long segments, which the steps at start may not launch: one query and
        one key."""
        spec, heads, num_heads = self.spec, self.heads, self.group.num_q_heads
        zeros = partial(torch.zeros, dtype=spec.dtype, device=spec.device)
        segments = torch.tensor([[0, 1, 0, 1, 0, 0]], dtype=torch.int32, device=spec.device)
        expanded = Expanded(
            q=zeros(1, num_heads, heads.qk_dim),
            keys_values=zeros(1, num_heads, heads.nope_dim + heads.v_dim),
            rotated=zeros(1, heads.rope_dim),
            out=zeros(1, num_heads, heads.v_dim),
            lse=zeros(1, num_heads, dtype=torch.float32),
        )
        for max_q_len in (1, SHORT + 1):
            latent_prefill_attention(expanded, segments, max_q_len, self.group.softmax_scale)


class TritonLatentBackend(TritonPrefillBackend):
    """Nothing is planned on the host: captured graphs are replayed unchanged."""

    supports_graphs = True

    def __init__(self, spec: AttentionSpec, group: LayerGroup) -> None:
        super().__init__(spec, group)
        self._workspace = LatentDecodeWorkspace(group.num_q_heads, self.heads.rank, spec.max_rows, spec.device)
        facts = DeviceFacts.of(spec.device)
        self._pdl, self._num_sms = facts.dependent_launch, facts.multiprocessors or 1
        self._shared = shared_memory(spec.device)

    def plan_decode(self, inputs: DecodeInputs) -> LatentDecodeBatch:
        shape = latent_decode_shape(
            inputs.batch_size, self.group.num_q_heads, self._num_sms, self._shared,
            half_precision=self.spec.dtype.itemsize == 2,
        )  # fmt: skip
        pdl = self._pdl and inputs.batch_size <= MAX_EARLY_BATCH
        return LatentDecodeBatch(inputs.rows, inputs.kv_lens, inputs.page_table, self._workspace, shape, pdl)

    def attend_latents(self, layer: AttentionLayer, q: torch.Tensor, q_rope: torch.Tensor, plan: Plan) -> torch.Tensor:
        return latent_decode_attention(q, q_rope, layer, plan)

    def decode_batches(self, max_batch: int) -> tuple[int, ...]:
        return distinct_latent_batches(max_batch, self.group.num_q_heads)
