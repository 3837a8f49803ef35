"""A step under construction, from which a StepPlan is built."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from minisgl_backend.arrays import NO_INT32, NO_INT64, Int32Array, Int64Array
from minisgl_backend.cache.lease import TableEntries
from minisgl_backend.cache.row_states import Folds
from minisgl_backend.step import AdmittedRow, EncodeSlice, PrefillChunk, StepPlan

_Entries = tuple[Int32Array, Int32Array, Int32Array, Int32Array]
_NO_ENTRIES: _Entries = (NO_INT32, NO_INT32, NO_INT32, NO_INT32)


class StepPlanBuilder:
    """Collects the parts of one step, in the order in which they are decided."""

    __slots__ = (
        "_admitted",
        "_decode_lengths",
        "_decode_rows",
        "_decode_uids",
        "_draft_tokens",
        "_encode",
        "_entries",
        "_folds",
        "_num_pages",
        "_num_proposed",
        "_num_proposing",
        "_pages_to_zero",
        "_prefill",
    )

    def __init__(self, num_pages: int = 1) -> None:
        """`num_pages`: of a column (`kv.groups`)."""
        self._num_pages = num_pages
        self._admitted: list[AdmittedRow] = []
        self._prefill: list[PrefillChunk] = []
        self._encode: tuple[EncodeSlice, ...] = ()
        self._decode_rows = self._decode_lengths = self._draft_tokens = self._pages_to_zero = NO_INT32
        self._decode_uids: Int64Array = NO_INT64
        self._num_proposed = self._num_proposing = 0
        self._folds: Folds | None = None
        self._entries: list[_Entries] = []  # made in every step: plain tuples of the fields of TableEntries

    @property
    def empty(self) -> bool:
        return not (self._prefill or len(self._decode_rows) or self._encode or self._admitted)

    @property
    def has_prefill(self) -> bool:
        return bool(self._prefill)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self._prefill)

    @property
    def num_decoding(self) -> int:
        return len(self._decode_rows)

    @property
    def num_encoding(self) -> int:
        """Slices of images."""
        return len(self._encode)

    def encode(self, one: EncodeSlice) -> None:
        self._encode += (one,)

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

    def fold(self, folds: Folds) -> None:
        """Sets the folds that precede the step's decode entries."""
        self._folds = folds

    def propose(self, count: int, num_rows: int) -> None:
        """Makes this a step of the proposer: `count` tokens for each row of the first `num_rows` decode entries."""
        self._num_proposed, self._num_proposing = count, num_rows

    def zero_pages(self, pages: Int32Array) -> None:
        """Adds pages to be set to zero before the step writes anything, int32 [num_pages]."""
        self._pages_to_zero = pages

    def write_pages(self, rows: Int32Array, columns: Int32Array, page_ids: Int32Array) -> None:
        """Adds new page-table entries of whole columns: rows and columns [num_entries], and pages place by place,
        [num_pages * num_entries]."""
        groups = NO_INT32  # they are all 0
        if self._num_pages > 1:
            groups = np.repeat(np.arange(self._num_pages, dtype=np.int32), len(rows))
            rows, columns = np.tile(rows, self._num_pages), np.tile(columns, self._num_pages)
        self._entries.append((groups, rows, columns, page_ids))

    def write_entries(self, entries: TableEntries) -> None:
        """Adds new page-table entries of some places."""
        self._entries.append(entries)

    def write_older_entries(self, entries: list[TableEntries]) -> None:
        """Adds entries that precede all others of the step, in order; later values of an entry win."""
        decided = TableEntries(*_joined([*entries, self.entries]))
        key = (decided.groups.astype(np.int64) << 48) | (decided.rows.astype(np.int64) << 24) | decided.columns
        last = len(key) - 1 - np.unique(key[::-1], return_index=True)[1]
        self._entries = [TableEntries(*(values[last] for values in decided))]

    @property
    def entries(self) -> TableEntries:
        """All page-table entries written so far."""
        entries = TableEntries(*_joined(self._entries))
        if self._num_pages == 1:
            return entries._replace(groups=np.zeros(len(entries.rows), dtype=np.int32))
        return entries

    def build(self, step: int, freed_vectors: tuple[bytes, ...] = ()) -> StepPlan:
        """`freed_vectors`: see StepPlan."""
        groups, rows, columns, pages = _joined(self._entries)
        plan = StepPlan(
            step=step,
            admitted=tuple(self._admitted),
            page_groups=groups if self._num_pages > 1 else NO_INT32,
            page_rows=rows,
            page_columns=columns,
            page_ids=pages,
            prefill=tuple(self._prefill),
            decode_rows=self._decode_rows,
            decode_lengths=self._decode_lengths,
            decode_uids=self._decode_uids,
            cleared_pages=self._pages_to_zero,
            draft_tokens=self._draft_tokens,
            num_proposed=self._num_proposed,
            num_proposing=self._num_proposing,
        )
        if self._folds is None and not self._encode and not freed_vectors:
            return plan  # most steps, and all without states and images
        plan = msgspec.structs.replace(plan, freed_vectors=freed_vectors, encode=self._encode)
        if (folds := self._folds) is None:
            return plan
        return msgspec.structs.replace(
            plan,
            fold_rows=folds.rows,
            fold_sources=folds.sources,
            fold_targets=folds.targets,
            fold_borders=folds.borders,
        )


def _joined(parts: Sequence[_Entries]) -> _Entries:
    if len(parts) < 2:
        return parts[0] if parts else _NO_ENTRIES
    groups, rows, columns, pages = map(np.concatenate, zip(*parts, strict=True))
    return groups, rows, columns, pages
