"""States of the rows of a `PagedModel`, as a scheduler would have them kept and folded."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from minisgl_backend.arrays import Int32Array
from minisgl_backend.attention.base import AttentionSpec, RowStates
from minisgl_backend.kernels.recurrent.calls import ChunkBatch, ChunkSpan, FoldBatch, chunk_tables
from minisgl_backend.kernels.recurrent.reference import delta_fold
from minisgl_backend.kv.state import StateLayout, StatePool
from minisgl_backend.models.config import ModelConfig

LEAST_KEPT = 16  # tokens of the smallest pages at whose ends states are kept for other rows


class PagedStates:
    """Row i has slot i + 1; each of its pages has one more, for the state at its end. All memory is NaN at first."""

    def __init__(self, layout: StateLayout, spec: AttentionSpec) -> None:
        self._page_size, self._max_rows = spec.page_size, spec.max_rows
        self._pages = spec.max_pages_per_row if spec.page_size >= LEAST_KEPT else 0
        self.pool = StatePool(
            layout,
            page_size=spec.page_size,
            max_drafts=0,
            num_slots=spec.max_rows * (1 + self._pages),
            num_rows=spec.max_rows,
            device=spec.device,
        )
        self.poison()
        slots = torch.arange(1, spec.max_rows + 1, dtype=torch.int32, device=spec.device)
        self.tables = RowStates(slots, torch.zeros_like(slots))
        self._shared: dict[int, int] = {}  # by row that has not computed anything: the slot that it begins with

    @classmethod
    def of(cls, config: ModelConfig, spec: AttentionSpec, tp_size: int) -> PagedStates | None:
        """None: the model has no states."""
        layout = StateLayout.of((layer.mixer.state for layer in config.layers), spec.dtype, tp_size)
        return None if layout is None else cls(layout, spec)

    def poison(self) -> None:
        for stack in self.pool.stacks:
            for tensor in stack:
                tensor.fill_(torch.nan)

    def _kept(self, row: int, column: int) -> int:
        """The slot of the state at the end of a page; 0: it is not kept."""
        return 1 + self._max_rows + row * self._pages + column if self._pages else 0

    def share_prefix(self, source: int, target: int, num_pages: int) -> None:
        assert self._pages, "states are kept at the ends of larger pages"
        self._shared[target] = self._kept(source, num_pages - 1)
        self.tables.border[target] = num_pages * self._page_size

    def fold(self, lengths: Mapping[int, int]) -> None:
        """Moves the states of rows, which have so many tokens, to the page that their next token is in."""
        borders = {row: length // self._page_size * self._page_size for row, length in lengths.items()}
        due = [row for row, border in borders.items() if border > self.tables.border[row]]
        if due:
            rows = torch.tensor(due, dtype=torch.int32, device=self.tables.border.device)
            new = torch.tensor([borders[row] for row in due], dtype=torch.int32, device=rows.device)
            slots = self.tables.slot[rows]
            batch = FoldBatch(rows=rows, sources=slots, targets=slots, state_border=self.tables.border, borders=new)
            for stack in self.pool.stacks:
                delta_fold(stack, batch, self._page_size)
            self.tables.border[rows] = new

    def chunks(self, rows: Int32Array, starts: Int32Array, ends: Int32Array) -> ChunkBatch:
        """The chunks of a step, which begin at their rows' borders; moves these to the chunks' last ones."""
        spans, page = [], self._page_size
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
            assert start == self.tables.border[row], "a chunk begins where its row's state is"
            columns = range(start // page, end // page) if self._pages else ()
            source = self._shared.pop(row, row + 1 if start else 0)
            kept = tuple(((column + 1) * page, self._kept(row, column)) for column in columns)
            spans.append(ChunkSpan(row=row, start=start, end=end, source=source, target=row + 1, checkpoints=kept))
            self.tables.border[row] = end // page * page
        tables = (torch.from_numpy(np.ascontiguousarray(table)) for table in chunk_tables(spans, page))
        return ChunkBatch(*(table.to(self.tables.slot.device) for table in tables))
