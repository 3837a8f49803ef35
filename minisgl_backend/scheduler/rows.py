"""The numbers of all running sequences, as one array for each kind of number, indexed by row.

A decode step reads and writes these arrays whole, so that its cost does not grow with Python work for each sequence.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from minisgl_backend.scheduler.sequence import Sequence

Int32Array = npt.NDArray[np.int32]
IndexArray = npt.NDArray[np.intp]

NOT_A_TOKEN = -1
LARGEST_TOKEN = 2**31 - 1


class RowState:
    """Struct of arrays over rows; all are [max_rows] unless said otherwise."""

    def __init__(self, max_rows: int, max_length: int, eos_token_ids: tuple[int, ...]) -> None:
        self._eos = eos_token_ids
        self._free = list(range(max_rows - 1, -1, -1))  # a stack: low rows first
        self._stop_ids = np.full((max_rows, 1), NOT_A_TOKEN, dtype=np.int32)  # widened on demand
        self._num_stop_rows = 0
        self.sequences: list[Sequence | None] = [None] * max_rows
        self.max_length = max_length
        # Lazily committed by the operating system: untouched parts cost nothing.
        self.token_ids: Int32Array = np.zeros((max_rows, max_length), dtype=np.int32)  # [max_rows, max_length]
        self.uid = np.zeros(max_rows, dtype=np.int64)
        self.planned = np.zeros(max_rows, dtype=np.int32)  # tokens in the cache after every step planned so far
        self.total = np.zeros(max_rows, dtype=np.int32)  # tokens known: prompt and committed answer
        self.prompt_len = np.zeros(max_rows, dtype=np.int32)
        self.limit = np.zeros(max_rows, dtype=np.int32)  # tokens at which the sequence ends with LENGTH
        self.stops_from = np.zeros(max_rows, dtype=np.int32)  # total at and after which stop tokens count
        self.admission = np.zeros(max_rows, dtype=np.int64)  # running number, by age
        self.last_step = np.full(max_rows, -1, dtype=np.int64)  # the last step that names the row
        self.active = np.zeros(max_rows, dtype=np.bool_)  # running: neither ended nor preempted
        self.ended = np.zeros(max_rows, dtype=np.bool_)
        self.ends_early = np.zeros(max_rows, dtype=np.bool_)  # something but its limit may end it
        self.obeys_eos = np.zeros(max_rows, dtype=np.bool_)
        self.has_stop_ids = np.zeros(max_rows, dtype=np.bool_)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def place(self, sequence: Sequence) -> int:
        """Gives the sequence a row and copies its numbers there."""
        row = self._free.pop()
        params, tokens = sequence.params, sequence.token_ids
        sequence.row = row
        self.sequences[row] = sequence
        self.token_ids[row, : len(tokens)] = tokens
        self.uid[row] = sequence.uid
        self.admission[row] = sequence.admission
        self.planned[row] = 0
        self.total[row] = len(tokens)
        self.prompt_len[row] = sequence.prompt_len
        self.ends_early[row] = ends_early(sequence)
        self.limit[row] = limit_of(sequence, self.max_length)
        self.stops_from[row] = min(sequence.prompt_len + params.min_tokens, LARGEST_TOKEN)
        self.last_step[row] = -1
        self.active[row] = True
        self.ended[row] = False
        self.obeys_eos[row] = not params.ignore_eos
        self._set_stop_ids(row, params.stop_token_ids)
        return row

    def clear(self, sequence: Sequence) -> None:
        """Takes the row back."""
        row = sequence.row
        assert self.sequences[row] is sequence, "a row is cleared by its own sequence"
        self._num_stop_rows -= bool(self.has_stop_ids[row])
        self.has_stop_ids[row] = self.active[row] = False
        self.sequences[row] = None
        sequence.row = -1
        self._free.append(row)

    def stops(self, rows: IndexArray, totals: Int32Array, token_ids: Int32Array) -> npt.NDArray[np.bool_] | None:
        """Which of these new tokens end their sequence, bool [num_rows]; None when no one does.

        Args:
            rows: [num_rows]
            totals: tokens of each sequence with the new one, [num_rows].
            token_ids: the new tokens, [num_rows].
        """
        found: npt.NDArray[np.bool_] | None = None
        for eos in self._eos:
            hits = token_ids == eos
            if hits.any():
                hits &= self.obeys_eos[rows]
                found = hits if found is None else found | hits
        if self._num_stop_rows:
            with_stops = np.flatnonzero(self.has_stop_ids[rows])
            hits = (self._stop_ids[rows[with_stops]] == token_ids[with_stops, None]).any(axis=1)
            if hits.any():
                found = np.zeros(len(rows), dtype=np.bool_) if found is None else found
                found[with_stops[hits]] = True
        if found is not None:
            found &= totals >= self.stops_from[rows]
        return found

    def stops_one(self, sequence: Sequence, total: int, token_id: int) -> bool:
        """`stops` for a single sequence and its new token."""
        params = sequence.params
        hit = token_id in params.stop_token_ids or (token_id in self._eos and not params.ignore_eos)
        return hit and total >= sequence.prompt_len + params.min_tokens

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        stop_ids = tuple(token for token in stop_ids if 0 <= token <= LARGEST_TOKEN)  # others are never sampled
        self.has_stop_ids[row] = bool(stop_ids)
        if not stop_ids:
            return
        self._num_stop_rows += 1
        width = self._stop_ids.shape[1]
        if len(stop_ids) > width:
            wider = np.full((len(self._stop_ids), len(stop_ids)), NOT_A_TOKEN, dtype=np.int32)
            wider[:, :width] = self._stop_ids
            self._stop_ids = wider
        self._stop_ids[row] = NOT_A_TOKEN
        self._stop_ids[row, : len(stop_ids)] = stop_ids


def limit_of(sequence: Sequence, max_length: int) -> int:
    """Tokens, prompt and answer, at which a sequence ends."""
    if sequence.params.max_tokens is None:
        return max_length
    return min(sequence.prompt_len + sequence.params.max_tokens, max_length)


def ends_early(sequence: Sequence) -> bool:
    """Whether anything but its limit can end a sequence."""
    params = sequence.params
    return not params.ignore_eos or bool(params.stop_token_ids) or bool(params.stop)
