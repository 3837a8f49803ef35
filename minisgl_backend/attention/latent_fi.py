"""The `fi` backend of latents (MLA): FlashInfer's kernels for decode (Ye et al., 2025), any power-of-two page size.

FlashInfer takes its FA3 kernels on Hopper and its FA2 ones elsewhere, and plans on the host. Prefill is by this
project's kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from minisgl_backend.attention.base import AttentionSpec, DecodeInputs, LayerGroup
from minisgl_backend.attention.flashinfer import Planner, flatten_pages
from minisgl_backend.attention.latent_triton import TritonPrefillBackend
from minisgl_backend.attention.layer import AttentionLayer

_WORKSPACE_BYTES = 128 << 20


class FlashInferLatentBackend(TritonPrefillBackend):
    def __init__(self, spec: AttentionSpec, group: LayerGroup) -> None:
        super().__init__(spec, group)
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        self._wrapper = BatchMLAPagedAttentionWrapper
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)
        self._eager = Planner(self._wrapper(self._workspace))
        self._graph_planners: dict[int, Planner] = {}
        self._graph_indices: torch.Tensor | None = None

    def plan_decode(self, inputs: DecodeInputs) -> Any:
        self._plan(self._eager, inputs)
        return self._eager.wrapper

    def attend_latents(self, layer: AttentionLayer, q: torch.Tensor, plan: Any) -> torch.Tensor:
        rank, kept = self.heads.rank, layer.kv.k.squeeze(1)
        attended: torch.Tensor = plan.run(q[..., :rank], q[..., rank:], kept[..., :rank], kept[..., rank:])
        return attended

    def allocate_graph(self, max_batch_size: int) -> None:
        most = max_batch_size * self.spec.max_pages_per_row
        self._graph_indices = torch.zeros(most, dtype=torch.int32, device=self.spec.device)

    def plan_capture(self, inputs: DecodeInputs) -> Any:
        batch, device = inputs.batch_size, self.spec.device
        wrapper = self._wrapper(
            self._workspace,
            use_cuda_graph=True,
            qo_indptr=torch.zeros(batch + 1, dtype=torch.int32, device=device),
            kv_indptr=torch.zeros(batch + 1, dtype=torch.int32, device=device),
            kv_indices=self._graph_indices,
            kv_len_arr=torch.zeros(batch, dtype=torch.int32, device=device),
        )
        self._graph_planners[batch] = Planner(wrapper)
        self._plan(self._graph_planners[batch], inputs)
        return wrapper

    def plan_replay(self, inputs: DecodeInputs) -> None:
        self._plan(self._graph_planners[inputs.batch_size], inputs)

    def _plan(self, planner: Planner, inputs: DecodeInputs) -> None:
        spec, heads = self.spec, self.heads
        pages = flatten_pages(inputs.kv_lens_host, inputs.rows, inputs.page_table, spec.page_size)
        one_each = torch.from_numpy(np.arange(inputs.batch_size + 1, dtype=np.int32))
        planner.plan(
            one_each, pages.indptr, pages.indices, torch.from_numpy(inputs.kv_lens_host), self.group.num_q_heads,
            heads.rank, heads.rope_dim, spec.page_size, True, self.group.softmax_scale, spec.dtype, spec.dtype,
        )  # fmt: skip
