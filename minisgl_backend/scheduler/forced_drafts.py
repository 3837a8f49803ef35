"""Drafts without a proposer: tokens that a grammar forces."""

from __future__ import annotations

from collections.abc import Callable

from minisgl_backend.arrays import NO_INT32, IndexArray, Int32Array
from minisgl_backend.scheduler.rows import RowState

# (uid, most) -> the tokens that the sequence's grammar forces after its committed ones: int32 [up to `most`].
ForcedTokens = Callable[[int, int], Int32Array]


def no_forced_tokens(uid: int, most: int) -> Int32Array:
    """Stands in where there are no grammars."""
    return NO_INT32


class ForcedDrafts:
    """Asks the grammar once for each token of a sequence."""

    def __init__(self, rows: RowState, tokens: ForcedTokens, most: int) -> None:
        """`most`: drafts of one row in one step."""
        self._state, self._tokens = rows, tokens
        self._asked = most + 1  # one more, for the token of the step in flight
        self._known: dict[int, tuple[int, int, Int32Array]] = {}  # row -> uid, length at that time, forced tokens

    def without_any(self, rows: IndexArray) -> IndexArray:
        """Those of `rows`, intp [num_rows], that have no forced tokens."""
        if not self._state.has_grammar.take(rows).any():
            return rows
        return rows[[not len(self.of(row)) for row in rows.tolist()]]

    def of(self, row: int) -> Int32Array:
        """The forced tokens after the row's committed ones, int32 [up to `most` + 1]."""
        if not self._state.has_grammar[row]:
            return NO_INT32
        uid, total = int(self._state.uid[row]), int(self._state.total[row])
        known = self._known.get(row)
        if known is None or known[:2] != (uid, total):
            known = self._known[row] = uid, total, self._tokens(uid, self._asked)
        return known[2]
