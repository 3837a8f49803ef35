"""A step under construction, from which a StepPlan is built."""

from __future__ import annotations

import numpy as np

from minisgl_backend.arrays import NO_INT32, NO_INT64, Int32Array, Int64Array
from minisgl_backend.cache.lease import TableEntries
from minisgl_backend.step import AdmittedRow, PrefillChunk, StepPlan


class StepPlanBuilder:
    """Collects the parts of one step, in the order in which they are decided."""

    __slots__ = (
        "_admitted",
        "_columns",
        "_decode_lengths",
        "_decode_rows",
        "_decode_uids",
        "_draft_tokens",
        "_groups",
        "_num_groups",
        "_num_proposed",
        "_num_proposing",
        "_page_ids",
        "_pages_to_zero",
        "_prefill",
        "_rows",
    )

    def __init__(self, num_groups: int = 1) -> None:
        """`num_groups`: number of the model's cache groups."""
        self._num_groups = num_groups
        self._admitted: list[AdmittedRow] = []
        self._prefill: list[PrefillChunk] = []
        self._decode_rows: Int32Array = NO_INT32
        self._decode_lengths: Int32Array = NO_INT32
        self._decode_uids: Int64Array = NO_INT64
        self._draft_tokens: Int32Array = NO_INT32
        self._num_proposed = self._num_proposing = 0
        self._pages_to_zero: Int32Array = NO_INT32
        self._groups: list[Int32Array] = []  # where there are several groups
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
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self._prefill)

    @property
    def num_decoding(self) -> int:
        return len(self._decode_rows)

    def admit(self, row: AdmittedRow) -> None:
        self._admitted.append(row)

    def add_chunk(self, chunk: PrefillChunk) -> None:
        self._prefill.append(chunk)

    def decode(
        self, rows: Int32Array, uids: Int64Array, lengths: Int32Array, draft_tokens: Int32Array = NO_INT32
    ) -> None:
        """Sets all decode entries of the step, [num_decode] each; `draft_tokens` may be [0]."""
        self._decode_rows, self._decode_uids, self._decode_lengths = rows, uids, lengths
        self._draft_tokens = draft_tokens

    def propose(self, count: int, num_rows: int) -> None:
        """Makes this a step of the proposer: `count` tokens for each row of the first `num_rows` decode entries."""
        self._num_proposed, self._num_proposing = count, num_rows

    def zero_pages(self, pages: Int32Array) -> None:
        """Adds pages to be set to zero before the step writes anything, int32 [num_pages]."""
        self._pages_to_zero = pages

    def write_pages(self, rows: Int32Array, columns: Int32Array, page_ids: Int32Array) -> None:
        """Adds new page-table entries of all groups: rows and columns [num_entries], and pages group by group,
        [num_groups * num_entries]."""
        if self._num_groups > 1:
            self._groups.append(np.repeat(np.arange(self._num_groups, dtype=np.int32), len(rows)))
            rows, columns = np.tile(rows, self._num_groups), np.tile(columns, self._num_groups)
        self._rows.append(rows)
        self._columns.append(columns)
        self._page_ids.append(page_ids)

    def write_entries(self, entries: TableEntries) -> None:
        """Adds new page-table entries of some groups."""
        if self._num_groups > 1:
            self._groups.append(entries.groups)
        self._rows.append(entries.rows)
        self._columns.append(entries.columns)
        self._page_ids.append(entries.pages)

    def write_older_entries(self, entries: list[TableEntries]) -> None:
        """Adds entries that precede all others of the step, in order; later values of an entry win."""
        decided = [*entries, self.entries]
        groups, rows, columns, pages = (
            np.concatenate([getattr(one, name) for one in decided]) for name in ("groups", "rows", "columns", "pages")
        )
        key = (groups.astype(np.int64) << 48) | (rows.astype(np.int64) << 24) | columns
        last = len(key) - 1 - np.unique(key[::-1], return_index=True)[1]
        self._groups = [groups[last]] if self._num_groups > 1 else []
        self._rows, self._columns, self._page_ids = [rows[last]], [columns[last]], [pages[last]]

    @property
    def entries(self) -> TableEntries:
        """All page-table entries written so far."""
        groups = self._groups if self._num_groups > 1 else [np.zeros(len(rows), dtype=np.int32) for rows in self._rows]
        return TableEntries(*(_joined(parts) for parts in (groups, self._rows, self._columns, self._page_ids)))

    def build(self, step: int) -> StepPlan:
        return StepPlan(
            step=step,
            admitted=tuple(self._admitted),
            page_groups=_joined(self._groups),
            page_rows=_joined(self._rows),
            page_columns=_joined(self._columns),
            page_ids=_joined(self._page_ids),
            prefill=tuple(self._prefill),
            decode_rows=self._decode_rows,
            decode_lengths=self._decode_lengths,
            decode_uids=self._decode_uids,
            cleared_pages=self._pages_to_zero,
            draft_tokens=self._draft_tokens,
            num_proposed=self._num_proposed,
            num_proposing=self._num_proposing,
        )


def _joined(parts: list[Int32Array]) -> Int32Array:
    if not parts:
        return NO_INT32
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
