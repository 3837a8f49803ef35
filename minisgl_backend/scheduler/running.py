"""The sequences that have a row and pages: how they start, leave the plans, and let go."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl_backend.cache.kv_manager import KVManager
from minisgl_backend.cache.prefix_cache import NO_PAGES, PrefixMatch
from minisgl_backend.config import SchedulerLimits
from minisgl_backend.scheduler.policy import WaitingQueue
from minisgl_backend.scheduler.rows import RowState
from minisgl_backend.scheduler.sequence import Sequence, SequenceState
from minisgl_backend.scheduler.step_plan_builder import NONE32, NONE64, StepPlanBuilder
from minisgl_backend.step import AdmittedRow, StepPlan

Int32Array = npt.NDArray[np.int32]
IndexArray = npt.NDArray[np.intp]


class RunningSet:
    """Rows, leases and the order of the running sequences.

    A sequence that ends or is preempted leaves the plans at once, but keeps row and lease until no step in flight
    names it (the release law); meanwhile it is in `settling`.
    """

    def __init__(self, limits: SchedulerLimits, queue: WaitingQueue) -> None:
        max_rows = limits.max_running_requests
        self.max_length = min(limits.max_seq_len, limits.num_pages * limits.page_size)
        self.rows = RowState(max_rows, self.max_length, limits.eos_token_ids)
        self.kv = KVManager(
            limits.num_pages,
            limits.page_size,
            max_rows,
            -(-self.max_length // limits.page_size),
            limits.cache_type,
            record_changes=limits.record_cache_changes,
        )
        self.committed = -1  # number of the last committed step
        self.prefilling: list[Sequence] = []  # in order of admission
        self.settling: list[Sequence] = []
        self.capacity_changed = True  # pages or a row have come back since admission last failed
        self._queue = queue
        self._decode_index: IndexArray = np.empty(0, dtype=np.intp)  # rows whose prompt is planned, oldest first
        self._decode_arrays: tuple[Int32Array, npt.NDArray[np.int64]] | None = (NONE32, NONE64)  # None: out of date
        # Columns of a row's page table and their new pages: the next plan tells the runner.
        self._swaps: list[tuple[Sequence, Int32Array, Int32Array]] = []
        self._retiring: list[tuple[int, Int32Array]] = []  # (step after which they are free, pages)
        self._matched_pages = np.zeros(max_rows, dtype=np.int32)  # shared at admission: not freed by this row's end

    @property
    def decode_index(self) -> IndexArray:
        """Rows that may decode, in the order in which their prompts were finished; intp [num_rows]. Never written."""
        return self._decode_index

    @property
    def decode_arrays(self) -> tuple[Int32Array, npt.NDArray[np.int64]]:
        """`decode_index` as int32 and the uids of its rows; kept from step to step while nothing changes."""
        if self._decode_arrays is None:
            index = self._decode_index
            self._decode_arrays = index.astype(np.int32), self.rows.uid[index]
        return self._decode_arrays

    @property
    def num_active(self) -> int:
        """Sequences that can be planned."""
        return len(self.rows.sequences) - self.rows.num_free - len(self.settling)

    def active(self) -> list[Sequence]:
        """Sequences that can be planned, by row."""
        return [one for one in self.rows.sequences if one is not None and one.state is SequenceState.RUNNING]

    def start(self, sequence: Sequence, match: PrefixMatch[Any], admission: int, builder: StepPlanBuilder) -> None:
        """Gives a waiting sequence a row and pages for all its tokens, and tells the builder."""
        tokens = sequence.token_ids
        cached = len(match.pages) * self.kv.page_size
        sequence.state, sequence.admission = SequenceState.RUNNING, admission
        row = self.rows.place(sequence)
        sequence.lease = self.kv.acquire(row, match, len(tokens))
        self._matched_pages[row] = len(match.pages)
        self.rows.planned[row] = cached
        self.prefilling.append(sequence)
        params = sequence.params
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs.clear()  # a preempted prompt starts again
        elif params.prompt_logprobs is not None:  # told already, or by another sequence of the request
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        pages = self.kv.pages_of(sequence.lease).copy()
        builder.write_pages(row, np.arange(len(pages), dtype=np.int32), pages)
        builder.admitted.append(AdmittedRow(row, sequence.uid, params, sequence.prompt_len, tokens, cached))

    def begin_decoding(self, sequence: Sequence) -> None:
        """The chunk that ends the prompt is planned: from the next step on the row decodes."""
        self.prefilling.remove(sequence)
        self._decode_index = np.append(self._decode_index, sequence.row)
        self._decode_arrays = None

    def leave(self, sequence: Sequence, state: SequenceState) -> None:
        """Takes a running sequence out of all plans to come; `state` is PREEMPTED or ENDED."""
        row = sequence.row
        if sequence.state is SequenceState.RUNNING:
            self.rows.active[row] = False
            self.settling.append(sequence)
            if sequence in self.prefilling:
                self.prefilling.remove(sequence)
            else:
                self._decode_index = self._decode_index[self._decode_index != row]
                self._decode_arrays = None
        self.rows.ended[row] = state is SequenceState.ENDED
        sequence.state = state

    def release_finished(self) -> None:
        """Frees what no step in flight names any more; preempted sequences go back to the queue."""
        still_named = []
        for sequence in self.settling:
            if self.rows.last_step[sequence.row] > self.committed:
                still_named.append(sequence)
            else:
                self._release(sequence)
        self.settling = still_named

    def publish(self, sequence: Sequence, num_tokens: int, last_planned: int) -> None:
        """Makes the full pages of the first `num_tokens` tokens, all committed, known to the prefix cache."""
        assert sequence.lease is not None, "a running sequence has a lease"
        swap = self.kv.publish(sequence.lease, self.rows.token_ids[sequence.row, :num_tokens])
        self.capacity_changed = True
        if swap is None:
            return
        self._swaps.append((sequence, swap.columns, swap.new))
        # A plan made before this commit still reads the old pages. What is planned from now on reads the new ones.
        self._retiring.append((last_planned, swap.old))

    def free_retired(self) -> None:
        """Gives back the swapped pages that no step in flight reads."""
        still_read = []
        for step, pages in self._retiring:
            if step > self.committed:
                still_read.append((step, pages))
            else:
                self.kv.pool.give_back(pages)
                self.capacity_changed = True
        self._retiring = still_read

    def send_swaps(self, builder: StepPlanBuilder) -> None:
        """Tells the runner of pages that were exchanged since the last plan."""
        for sequence, columns, pages in self._swaps:
            builder.write_pages(sequence.row, columns, pages)
        self._swaps = []

    def send_again(self, plan: StepPlan) -> None:
        """Tells the runner once more what a plan that was not executed said of the pages of sequences that go on."""
        goes_on = self.rows.active[plan.page_rows]
        for row in np.unique(plan.page_rows[goes_on]):
            sequence, entries = self.rows.sequences[row], plan.page_rows == row
            assert sequence is not None, "an active row has a sequence"
            self._swaps.append((sequence, plan.page_columns[entries], plan.page_ids[entries]))

    def freed_pages(self, rows: IndexArray) -> npt.NDArray[np.int64]:
        """Pages that become available when each of these rows ends, estimated; int64 [num_rows]."""
        return (self.kv.held[rows] - self._matched_pages[rows]).astype(np.int64)

    def check(self) -> None:
        """Raises AssertionError unless every law of rows, leases and pages holds."""
        rows, page_size = self.rows, self.kv.page_size
        present = [one for one in rows.sequences if one is not None]
        leases = [one.lease for one in present if one.lease is not None]
        assert len(leases) == len(present), "a row without a lease"
        retiring = [pages for _, pages in self._retiring]
        self.kv.check(leases, np.concatenate(retiring) if retiring else NO_PAGES)
        for one in present:
            row, active = one.row, one.state is SequenceState.RUNNING
            assert rows.sequences[row] is one, "a sequence and its row disagree"
            assert bool(rows.active[row]) == active, "a flag and a state disagree"
            assert bool(rows.ended[row]) == (one.state is SequenceState.ENDED), "a flag and a state disagree"
            assert int(self.kv.held[row]) * page_size >= int(rows.planned[row]), "a planned token has no page"
            assert (one in self.settling) != active, "a sequence settles when it is not active"
            places = [one in self.prefilling, bool((self._decode_index == row).any())]
            assert sum(places) == active, "an active sequence is in one place, another in none"
        assert len(np.unique(self._decode_index)) == len(self._decode_index), "a row decodes twice"

    def _release(self, sequence: Sequence) -> None:
        row, rows = sequence.row, self.rows
        computed = min(int(rows.planned[row]), int(rows.total[row]))
        tokens = rows.token_ids[row, : computed if sequence.sound else 0]
        if sequence.state is SequenceState.PREEMPTED:
            sequence.token_ids = rows.token_ids[row, : rows.total[row]].copy()
        assert sequence.lease is not None, "a sequence with a row has a lease"
        self.kv.release(sequence.lease, tokens, sound=sequence.sound)
        sequence.lease = None
        self._swaps = [entry for entry in self._swaps if entry[0] is not sequence]
        rows.clear(sequence)
        self.capacity_changed = True
        if sequence.state is SequenceState.PREEMPTED:
            sequence.state, sequence.admission = SequenceState.WAITING, -1
            self._queue.push(sequence)
