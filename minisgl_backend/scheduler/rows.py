"""The per-row numbers of all running sequences: one array for each kind of number, indexed by row.

A decode step reads and writes whole arrays, so that there is no Python work per sequence. Anyone may read them; only
the methods of `RowState` write them.
"""

from __future__ import annotations

import numpy as np

from minisgl_backend.arrays import BoolArray, IndexArray, Int32Array, UInt8Array
from minisgl_backend.request import FinishReason
from minisgl_backend.scheduler.sequence import Sequence

NOT_A_TOKEN = -1
LARGEST_TOKEN = 2**31 - 1
LENGTH = np.uint8(FinishReason.LENGTH)


class RowState:
    """Struct of arrays over rows; all are [max_rows] unless said otherwise."""

    def __init__(self, max_rows: int, max_length: int, eos_token_ids: tuple[int, ...]) -> None:
        self._eos = eos_token_ids
        self._free = list(range(max_rows - 1, -1, -1))  # a stack: low rows first
        self._stop_ids = np.full((max_rows, 1), NOT_A_TOKEN, dtype=np.int32)  # widened on demand
        self._num_stop_rows = 0
        self.sequences: list[Sequence | None] = [None] * max_rows
        self.max_length = max_length
        # Lazily committed by the operating system: untouched parts cost no memory.
        self.token_ids: Int32Array = np.zeros((max_rows, max_length), dtype=np.int32)  # [max_rows, max_length]
        self.uid = np.zeros(max_rows, dtype=np.int64)
        self.planned = np.zeros(max_rows, dtype=np.int32)  # tokens in the cache after all steps planned so far
        self.total = np.zeros(max_rows, dtype=np.int32)  # known tokens: prompt and committed answer
        self.prompt_len = np.zeros(max_rows, dtype=np.int32)
        self.limit = np.zeros(max_rows, dtype=np.int32)  # length at which the sequence ends with LENGTH
        self.stops_from = np.zeros(max_rows, dtype=np.int32)  # length from which on stop tokens count
        self.admission = np.zeros(max_rows, dtype=np.int64)  # serial number of the admission, by age
        self.last_step = np.full(max_rows, -1, dtype=np.int64)  # the last step that includes the row
        self.active = np.zeros(max_rows, dtype=np.bool_)  # running: neither ended nor preempted
        self.ended = np.zeros(max_rows, dtype=np.bool_)
        self.sampled = np.zeros(max_rows, dtype=np.bool_)  # sampled since it got the row: its prompt is committed
        self.ends_early = np.zeros(max_rows, dtype=np.bool_)  # something other than its limit may end it
        self.obeys_eos = np.zeros(max_rows, dtype=np.bool_)
        self.has_stop_ids = np.zeros(max_rows, dtype=np.bool_)
        self.background = np.zeros(max_rows, dtype=np.bool_)  # below the default priority
        self.num_background = 0  # number of background rows
        self.may_draft = np.zeros(max_rows, dtype=np.bool_)  # the request and its grammar masks allow drafts
        self.has_grammar = np.zeros(max_rows, dtype=np.bool_)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def next_free(self) -> int:
        """The row that `occupy` gives to the next sequence."""
        return self._free[-1]

    def tokens_of(self, row: int) -> Int32Array:
        """Prompt and committed answer of a row, int32 [num_tokens]; a view."""
        return self.token_ids[row, : self.total[row]]

    def occupy(self, sequence: Sequence, admission: int, cached_tokens: int) -> int:
        """Gives the sequence a free row, writes its numbers there and returns the row."""
        row = self._free.pop()
        params, tokens = sequence.params, sequence.token_ids
        self.sequences[row] = sequence
        self.token_ids[row, : len(tokens)] = tokens
        self.uid[row] = sequence.uid
        self.admission[row] = admission
        self.planned[row] = cached_tokens
        self.total[row] = len(tokens)
        self.prompt_len[row] = sequence.prompt_len
        self.ends_early[row] = ends_early(sequence)
        self.limit[row] = limit_of(sequence, self.max_length)
        self.stops_from[row] = min(sequence.prompt_len + params.min_tokens, LARGEST_TOKEN)
        self.last_step[row] = -1
        self.active[row] = True
        self.ended[row] = self.sampled[row] = False
        self.obeys_eos[row] = not params.ignore_eos
        self.background[row] = sequence.is_background
        self.num_background += sequence.is_background
        self.may_draft[row] = params.speculative and not params.bounds_thoughts
        self.has_grammar[row] = params.grammar is not None
        self._set_stop_ids(row, params.stop_token_ids)
        return row

    def plan_chunk(self, row: int, end: int, step: int) -> None:
        """A step computes the row's prompt up to the token before `end`."""
        self.planned[row] = end
        self.last_step[row] = step

    def plan_decode(self, rows: IndexArray, lengths: Int32Array, step: int) -> None:
        """A step computes one token for each of these rows, which then have `lengths` tokens in the cache."""
        self.planned[rows] = lengths
        self.last_step[rows] = step

    def plan_proposing(self, rows: IndexArray, step: int) -> None:
        """A proposer step includes these rows; it computes none of the model's tokens."""
        self.last_step[rows] = step

    def settle(self, rows: IndexArray, lengths: Int32Array) -> None:
        """The results of these rows' drafts are known: `lengths` tokens in the cache are valid."""
        self.planned[rows] = lengths

    def append_one(self, sequence: Sequence, position: int, token_id: int) -> FinishReason:
        """Appends the token that a prompt's last chunk sampled; returns the reason if it ends the sequence."""
        row, total, params = sequence.row, position + 1, sequence.params
        self.token_ids[row, position] = token_id
        self.total[row] = total
        self.sampled[row] = True
        stops = token_id in params.stop_token_ids or (token_id in self._eos and not params.ignore_eos)
        if stops and total >= sequence.prompt_len + params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if total >= self.limit[row] else FinishReason.RUNNING

    def append(self, rows: IndexArray, positions: Int32Array, token_ids: Int32Array) -> UInt8Array:
        """Appends one token to each row (no row twice); returns the `FinishReason` of each, uint8 [num_rows]."""
        totals = positions + 1
        self.token_ids[rows, positions] = token_ids
        self.total[rows] = totals
        reasons: UInt8Array = (totals >= self.limit.take(rows)) * LENGTH
        stopped = self._stopped(rows, totals, token_ids)
        if stopped is not None:
            reasons[stopped] = FinishReason.STOP
        return reasons

    def deactivate(self, row: int, *, ended: bool) -> None:
        """No later plan includes the row: its sequence has ended or is preempted."""
        self.active[row] = False
        self.ended[row] = ended

    def vacate(self, sequence: Sequence) -> None:
        """Takes the row back."""
        row = sequence.row
        assert self.sequences[row] is sequence, "a row is taken from its own sequence"
        self._num_stop_rows -= bool(self.has_stop_ids[row])
        self.num_background -= sequence.is_background
        self.has_stop_ids[row] = self.active[row] = False
        self.sequences[row] = None
        self._free.append(row)

    def _stopped(self, rows: IndexArray, totals: Int32Array, token_ids: Int32Array) -> BoolArray | None:
        """Which of these new tokens stop their sequence, bool [num_rows]; None when none does.

        Args:
            rows: [num_rows]
            totals: tokens of each sequence with the new one, [num_rows].
            token_ids: the new tokens, [num_rows].
        """
        found: BoolArray | None = None
        for eos in self._eos:
            if eos in token_ids:
                hits = (token_ids == eos) & self.obeys_eos[rows]
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
    """The length, prompt and answer, at which a sequence ends."""
    if sequence.params.max_tokens is None:
        return max_length
    return min(sequence.prompt_len + sequence.params.max_tokens, max_length)


def ends_early(sequence: Sequence) -> bool:
    """Whether anything but its limit can end a sequence."""
    params = sequence.params
    return not params.ignore_eos or bool(params.stop_token_ids) or bool(params.stop)
