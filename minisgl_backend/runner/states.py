"""The states of rows on one rank: where they are, and what a step's plan does to them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from minisgl_backend.arrays import Int32Array
from minisgl_backend.attention.base import RowStates
from minisgl_backend.errors import EngineDeadError
from minisgl_backend.kernels.recurrent.calls import ChunkSpan, FoldBatch, chunk_tables
from minisgl_backend.kernels.recurrent.choose import RecurrentKernels
from minisgl_backend.kv.state import StatePool
from minisgl_backend.runner.row_table import scatter_on
from minisgl_backend.step import PrefillChunk, StepPlan


class StateTables:
    """Tables of rows over a pool of states. Plans come in order; a step may be tried several times, and its folds are
    executed once."""

    def __init__(self, pool: StatePool, kernels: RecurrentKernels, max_rows: int, device: torch.device) -> None:
        self.pool, self._kernels = pool, kernels
        self._table, self._scatter = torch.zeros((2, max_rows), dtype=torch.int32, device=device), scatter_on(device)
        self.rows = RowStates(*self._table)
        self._slots = np.zeros(max_rows, dtype=np.int32)
        # Of rows in their prompts: where their first chunk begins, and the slot that it reads.
        self._first = np.zeros(max_rows, dtype=np.int32)
        self._source = np.zeros(max_rows, dtype=np.int32)
        self._folded = -1  # the last step whose folds were launched

    def arrays(self, plan: StepPlan) -> dict[str, Int32Array]:
        """What `apply` and the prompts' kernels need of a plan, by name; names without entries are left out."""
        page, found = self.pool.page_size, dict[str, Int32Array]()
        borders: dict[int, int] = {}
        for row in plan.admitted:
            self._slots[row.row], self._source[row.row] = row.state_slot, row.state_source
            self._first[row.row] = borders[row.row] = row.cached_len
        borders |= {chunk.row: chunk.end // page * page for chunk in plan.prefill}
        if plan.prefill:
            tables = chunk_tables([self._span(chunk) for chunk in plan.prefill], page)
            found["chunk_blocks"], found["chunk_rows"] = tables
        if len(plan.fold_rows):
            self._slots[plan.fold_rows] = plan.fold_targets
            found |= {
                "fold_rows": plan.fold_rows,
                "fold_sources": plan.fold_sources,
                "fold_targets": plan.fold_targets,
                "fold_borders": plan.fold_borders,
            }
        if borders or len(plan.fold_rows):
            rows = np.concatenate([np.array([*borders], dtype=np.int32), plan.fold_rows])
            ends = np.concatenate([np.array([*borders.values()], dtype=np.int32), plan.fold_borders])
            found |= {
                "state_tables": np.repeat(np.arange(2, dtype=np.int32), len(rows)),
                "state_rows": np.concatenate([rows, rows]),
                "state_values": np.concatenate([self._slots[rows], ends]),
            }
        return found

    def _span(self, chunk: PrefillChunk) -> ChunkSpan:
        row, slot = chunk.row, int(self._slots[chunk.row])
        source = int(self._source[row]) if chunk.start == self._first[row] else slot
        return ChunkSpan(row, chunk.start, chunk.end, source=source, target=slot, checkpoints=chunk.checkpoints)

    def apply(self, step: int, arrays: Mapping[str, torch.Tensor]) -> None:
        """Launches the folds of this step, then brings the tables up to date; in stream order, never waits. Raises
        EngineDeadError where a fold fails: some states may have moved then, so that no retry is right."""
        if "fold_rows" in arrays and step != self._folded:
            rows = arrays["fold_rows"]
            sources, targets, borders = (arrays[f"fold_{name}"] for name in ("sources", "targets", "borders"))
            batch = FoldBatch(rows, sources, targets, self.rows.border, borders)
            self._folded = step
            try:
                for stack in self.pool.stacks:
                    self._kernels.delta_fold(stack, batch, self.pool.page_size)
            except Exception as error:
                raise EngineDeadError(f"states have moved in part: {error}") from error
        if "state_rows" in arrays:
            self._scatter(self._table, arrays["state_tables"], arrays["state_rows"], arrays["state_values"])
