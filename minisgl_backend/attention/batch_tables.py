"""Page tables of batches, for kernels that cannot index the table of all rows."""

from __future__ import annotations

import torch

from minisgl_backend.attention.base import AttentionSpec, DecodeInputs, PrefillInputs


class BatchTables:
    """Gathers the batch's rows of the page table in each step; for captured graphs into one static buffer."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._static: torch.Tensor | None = None

    def gather(self, inputs: DecodeInputs | PrefillInputs) -> torch.Tensor:
        """int32 [batch, pages of the longest sequence]."""
        pages = -(-int(inputs.kv_lens_host.max()) // self._spec.page_size)
        return inputs.page_table[:, :pages].index_select(0, inputs.rows)

    def allocate(self, max_batch_size: int) -> None:
        """The buffer of `gather_static`, unless there is one already, which graphs may read."""
        if self._static is None or len(self._static) < max_batch_size:
            shape = (max_batch_size, self._spec.max_pages_per_row)
            self._static = torch.zeros(shape, dtype=torch.int32, device=self._spec.device)

    def gather_static(self, inputs: DecodeInputs) -> torch.Tensor:
        """int32 [batch, max_pages_per_row], always at the same address."""
        if self._static is None:
            raise RuntimeError("allocate_graph comes before plan_capture")
        return torch.index_select(inputs.page_table, 0, inputs.rows, out=self._static[: inputs.batch_size])
