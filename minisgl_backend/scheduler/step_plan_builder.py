"""A step while it is being planned; becomes a StepPlan at the end."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from minisgl_backend.step import NO_PAGES, AdmittedRow, PrefillChunk, StepPlan

Int32Array = npt.NDArray[np.int32]

NONE32: Int32Array = np.empty(0, dtype=np.int32)
NONE64: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
NONE32.setflags(write=False)
NONE64.setflags(write=False)


class StepPlanBuilder:
    """Collects the parts of one step, in the order in which they are decided."""

    __slots__ = (
        "_columns",
        "_page_ids",
        "_rows",
        "admitted",
        "cleared_pages",
        "decode_lengths",
        "decode_rows",
        "decode_uids",
        "prefill",
    )

    def __init__(self) -> None:
        self.admitted: list[AdmittedRow] = []
        self.prefill: list[PrefillChunk] = []
        self.decode_rows: Int32Array = NONE32
        self.decode_lengths: Int32Array = NONE32
        self.decode_uids: npt.NDArray[np.int64] = NONE64
        self.cleared_pages: Int32Array = NO_PAGES
        self._rows: list[Int32Array] = []
        self._columns: list[Int32Array] = []
        self._page_ids: list[Int32Array] = []

    @property
    def empty(self) -> bool:
        return not self.prefill and not len(self.decode_rows)

    def write_pages(self, rows: Int32Array | int, columns: Int32Array, page_ids: Int32Array) -> None:
        """Entries of the page table; `rows` is one row or one for each entry. No entry is written twice in a step."""
        self._rows.append(np.full(len(columns), rows, dtype=np.int32) if isinstance(rows, int) else rows)
        self._columns.append(columns)
        self._page_ids.append(page_ids)

    def build(self, step: int) -> StepPlan:
        return StepPlan(
            step=step,
            admitted=tuple(self.admitted),
            page_rows=_joined(self._rows),
            page_columns=_joined(self._columns),
            page_ids=_joined(self._page_ids),
            prefill=tuple(self.prefill),
            decode_rows=self.decode_rows,
            decode_lengths=self.decode_lengths,
            decode_uids=self.decode_uids,
            cleared_pages=self.cleared_pages,
        )


def _joined(parts: list[Int32Array]) -> Int32Array:
    if not parts:
        return NONE32
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
