"""The `fi` backend of latents (MLA): FlashInfer's kernels for decode (Ye et al., 2025), any power-of-two page size.

FlashInfer uses its FA3 kernels on Hopper and its FA2 kernels elsewhere, and plans on the host. Prefill uses this
project's kernels.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from minisgl_backend.attention.base import AttentionSpec, DecodeInputs, LayerGroup
from minisgl_backend.attention.flashinfer import Pages, PlanMemory, graph_indices
from minisgl_backend.attention.latent.triton_attn import TritonPrefillBackend
from minisgl_backend.attention.layer import AttentionLayer

_WORKSPACE_BYTES = 128 << 20


class FlashInferLatentBackend(TritonPrefillBackend):
    supports_graphs = True
    kernels: ClassVar[str] = "auto"  # of FlashInfer: fa2, fa3, or auto by GPU

    def __init__(self, spec: AttentionSpec, group: LayerGroup) -> None:
        super().__init__(spec, group)
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        self._wrapper = BatchMLAPagedAttentionWrapper
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)
        self._eager = self._wrapper(self._workspace, backend=self.kernels)
        self._memory = PlanMemory(self._eager)
        self._captured: dict[int, Any] = {}  # wrappers by batch size
        self._graph_indices: torch.Tensor | None = None

    def plan_decode(self, inputs: DecodeInputs) -> Any:
        return self._plan(self._eager, inputs)

    def attend_latents(self, layer: AttentionLayer, q: torch.Tensor, q_rope: torch.Tensor, plan: Any) -> torch.Tensor:
        rank, kept = self.heads.rank, layer.kv.k.squeeze(1)
        attended: torch.Tensor = plan.run(q, q_rope, kept[..., :rank], kept[..., rank:])
        return attended

    def allocate_graph(self, max_batch_size: int) -> None:
        self._graph_indices = graph_indices(self.spec, max_batch_size, self._graph_indices)

    def plan_capture(self, inputs: DecodeInputs) -> Any:
        batch, device = inputs.batch_size, self.spec.device
        if batch not in self._captured:
            self._captured[batch] = self._wrapper(
                self._workspace,
                use_cuda_graph=True,
                qo_indptr=torch.zeros(batch + 1, dtype=torch.int32, device=device),
                kv_indptr=torch.zeros(batch + 1, dtype=torch.int32, device=device),
                kv_indices=self._graph_indices,
                kv_len_arr=torch.zeros(batch, dtype=torch.int32, device=device),
                backend=self.kernels,
            )
        return self._plan(self._captured[batch], inputs)

    def plan_replay(self, inputs: DecodeInputs) -> None:
        self._plan(self._captured[inputs.batch_size], inputs)

    def _plan(self, wrapper: Any, inputs: DecodeInputs) -> Any:
        spec, heads = self.spec, self.heads
        pages = Pages(inputs.kv_lens_host, inputs.rows, spec.page_size, spec.device)
        one_each = torch.from_numpy(np.arange(inputs.batch_size + 1, dtype=np.int32))
        self._memory.plan(
            wrapper, one_each, pages.indptr, pages.indices(inputs.page_table), torch.from_numpy(inputs.kv_lens_host),
            self.group.num_q_heads, heads.rank, heads.rope_dim, spec.page_size, True, self.group.softmax_scale,
            spec.dtype, spec.dtype,
        )  # fmt: skip
        return wrapper
