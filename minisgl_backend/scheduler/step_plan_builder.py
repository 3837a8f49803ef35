"""A step while it is being planned; becomes a StepPlan at the end."""

from __future__ import annotations

import numpy as np

from minisgl_backend.arrays import NO_INT32, NO_INT64, Int32Array, Int64Array
from minisgl_backend.step import AdmittedRow, PrefillChunk, StepPlan


class StepPlanBuilder:
    """Collects the parts of one step, in the order in which they are decided."""

    __slots__ = (
        "_admitted",
        "_columns",
        "_decode_lengths",
        "_decode_rows",
        "_decode_uids",
        "_page_ids",
        "_pages_to_zero",
        "_prefill",
        "_rows",
    )

    def __init__(self) -> None:
        self._admitted: list[AdmittedRow] = []
        self._prefill: list[PrefillChunk] = []
        self._decode_rows: Int32Array = NO_INT32
        self._decode_lengths: Int32Array = NO_INT32
        self._decode_uids: Int64Array = NO_INT64
        self._pages_to_zero: Int32Array = NO_INT32
        self._rows: list[Int32Array] = []
        self._columns: list[Int32Array] = []
        self._page_ids: list[Int32Array] = []

    @property
    def empty(self) -> bool:
        return not self._prefill and not len(self._decode_rows)

    @property
    def has_prefill(self) -> bool:
        return bool(self._prefill)

    @property
    def num_decoding(self) -> int:
        return len(self._decode_rows)

    def admit(self, row: AdmittedRow) -> None:
        self._admitted.append(row)

    def add_chunk(self, chunk: PrefillChunk) -> None:
        self._prefill.append(chunk)

    def decode(self, rows: Int32Array, uids: Int64Array, lengths: Int32Array) -> None:
        """All decode rows of the step, [num_decode] each."""
        self._decode_rows, self._decode_uids, self._decode_lengths = rows, uids, lengths

    def zero_pages(self, pages: Int32Array) -> None:
        """Pages to be set to zero before anything of the step is written, int32 [num_pages]."""
        self._pages_to_zero = pages

    def write_pages(self, rows: Int32Array | int, columns: Int32Array, page_ids: Int32Array) -> None:
        """Entries of the page table; `rows` is one row or one for each entry. No entry is written twice in a step."""
        self._rows.append(np.full(len(columns), rows, dtype=np.int32) if isinstance(rows, int) else rows)
        self._columns.append(columns)
        self._page_ids.append(page_ids)

    def build(self, step: int) -> StepPlan:
        return StepPlan(
            step=step,
            admitted=tuple(self._admitted),
            page_rows=_joined(self._rows),
            page_columns=_joined(self._columns),
            page_ids=_joined(self._page_ids),
            prefill=tuple(self._prefill),
            decode_rows=self._decode_rows,
            decode_lengths=self._decode_lengths,
            decode_uids=self._decode_uids,
            cleared_pages=self._pages_to_zero,
        )


def _joined(parts: list[Int32Array]) -> Int32Array:
    if not parts:
        return NO_INT32
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
