"""The sequences that have a row and pages: how they start, leave the plans, and release both."""

from __future__ import annotations

from typing import Any

import numpy as np

from minisgl_backend.adapters.served import NO_ADAPTER
from minisgl_backend.arrays import NO_INT32, NO_INT64, IndexArray, Int32Array, Int64Array
from minisgl_backend.cache.kv_manager import KVManager
from minisgl_backend.cache.lease import TableEntries
from minisgl_backend.cache.prefix_cache import PrefixMatch
from minisgl_backend.kv.groups import CacheGroups
from minisgl_backend.scheduler.adapters import AdapterBook
from minisgl_backend.scheduler.checkpoints import states_to_keep
from minisgl_backend.scheduler.image_budget import ImageBudget
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.measured_steps import MeasuredSteps
from minisgl_backend.scheduler.policy import WaitingQueue
from minisgl_backend.scheduler.rows import RowState
from minisgl_backend.scheduler.sequence import Sequence, SequenceState
from minisgl_backend.scheduler.step_plan_builder import StepPlanBuilder
from minisgl_backend.step import AdmittedRow, PrefillChunk, StepPlan


class RunningSet:
    """Rows, leases and the order of the running sequences.

    A sequence that ends or is preempted leaves the plans at once, but keeps row and lease until no step in flight
    includes it (the release law); meanwhile it is in `releasing`.
    """

    def __init__(self, limits: SchedulerLimits, queue: WaitingQueue, adapters: AdapterBook) -> None:
        max_rows = limits.max_running_requests
        groups = CacheGroups(limits.cache_kinds, limits.page_size)
        self.max_length = groups.max_length(limits.num_pages, limits.max_seq_len)
        self.rows = RowState(max_rows, self.max_length, limits.eos_token_ids)
        most_pages = -(-self.max_length // limits.page_size)
        self.kv = KVManager(
            limits.num_pages,
            groups,
            max_rows,
            most_pages,
            limits.cache_type,
            record_changes=limits.record_cache_changes,
            num_state_slots=limits.num_state_slots,
        )
        self.steps = MeasuredSteps(limits.step_times)
        self.images = (
            None if limits.encoder is None else ImageBudget(limits.encoder, self.steps.estimate, limits.chunk_multiple)
        )
        self._columns: Int32Array = np.arange(most_pages, dtype=np.int32)  # columns of a row of the page table
        self._columns.flags.writeable = False
        self.committed = -1  # number of the last committed step
        self.prefilling: list[Sequence] = []  # in order of admission
        self.awaiting: list[Sequence] = []  # prompts planned to the end that will not decode
        self.releasing: list[Sequence] = []
        self._queue, self._adapters = queue, adapters
        self._decode_index: IndexArray = np.empty(0, dtype=np.intp)  # rows whose prompt is planned, oldest first
        self._decode_arrays: tuple[Int32Array, Int64Array] | None = (NO_INT32, NO_INT64)  # None: out of date
        # Changed entries of sequences' page tables, which the next plan sends to the runner.
        self._changed: list[tuple[Sequence, TableEntries]] = []
        self._retiring: list[tuple[int, Int32Array]] = []  # (step after which they are free, pages)
        # Pages of failed sequences, which may hold NaN: the next plan sets them to zero, whether they are free by then
        # or handed out again.
        self._to_zero: list[Int32Array] = []

    @property
    def decode_index(self) -> IndexArray:
        """Rows that may decode, in the order in which their prompts were finished; intp [num_rows]. Read-only."""
        return self._decode_index

    @property
    def decode_arrays(self) -> tuple[Int32Array, Int64Array]:
        """`decode_index` as int32 and the uids of its rows; cached while nothing changes."""
        if self._decode_arrays is None:
            index = self._decode_index
            self._decode_arrays = index.astype(np.int32), self.rows.uid[index]
        return self._decode_arrays

    @property
    def num_active(self) -> int:
        """Number of sequences that can be planned."""
        return len(self.rows.sequences) - self.rows.num_free - len(self.releasing)

    def active(self) -> list[Sequence]:
        """Sequences that can be planned, by row."""
        return [one for one in self.rows.sequences if one is not None and one.state is SequenceState.RUNNING]

    def num_begun_tokens(self) -> int:
        """Prompt tokens not planned yet, of prompts that have begun; background requests are not counted."""
        begun = [one for one in self.prefilling if not one.is_background]
        return sum(len(one.token_ids) - int(self.rows.planned[one.row]) for one in begun)

    def start(
        self, sequence: Sequence, match: PrefixMatch[Any], chunk_end: int, admission: int, builder: StepPlanBuilder
    ) -> None:
        """Gives a waiting sequence a row and pages for all its tokens (groups with windows: up to `chunk_end`), and
        writes these to the builder."""
        tokens = sequence.token_ids
        cached = match.num_pages * self.kv.page_size
        row = self.rows.occupy(sequence, admission, cached)
        lease = self.kv.acquire(row, match, len(tokens), chunk_end)
        sequence.admit(row, lease, admission, cached)
        self.prefilling.append(sequence)
        pages = self.kv.pages_of(lease)
        columns = self._columns[: pages.shape[1]]
        builder.write_pages(np.int32(row).repeat(len(columns)), columns, pages.flatten())
        params, pooling = sequence.params, sequence.pooling
        source, slot = 0, 0
        if self.kv.states is not None:
            source, slot = self.kv.states.slots_of(row)
            sequence.keep_states(states_to_keep(sequence, match, self.kv.page_size))
        adapter = 0 if sequence.adapter is NO_ADAPTER else self._adapters.slot_of(sequence.adapter)
        more = pooling, source, slot, sequence.contents, adapter
        builder.admit(AdmittedRow(row, sequence.uid, params, sequence.prompt_len, tokens, cached, *more))

    def plan_chunk(self, sequence: Sequence, end: int, step: int, builder: StepPlanBuilder) -> None:
        """Plans the prompt tokens up to `end`; after the chunk that ends the prompt the row decodes, if it samples."""
        row, tokens = sequence.row, sequence.token_ids
        start, is_last = int(self.rows.planned[row]), end == len(tokens)
        if (entries := self.kv.grow(row, end)) is not None:
            builder.write_entries(entries)
        checkpoints: tuple[tuple[int, int], ...] = ()
        if self.kv.states is not None:
            # What the row's own slot holds after its last chunk need not be written twice.
            own = self.kv.states.border_of(end) if is_last else 0
            kept = sequence.kept_states.items()
            borders = [(border, worth) for border, worth in kept if start < border <= end and border != own]
            checkpoints = self.kv.states.plan_chunk(row, end, borders)
        builder.add_chunk(PrefillChunk(row, start, tokens[start:end], sequence.wants(start, end), checkpoints))
        self.rows.plan_chunk(row, end, step)
        if self.images is not None and sequence.contents:
            self.images.note_chunk(sequence, end, step)
        if is_last:
            self.prefilling.remove(sequence)
            if sequence.pooling is not None:
                self.awaiting.append(sequence)
                return
            self._decode_index = np.concatenate((self._decode_index, (row,)))
            self._decode_arrays = None

    def images_ahead(self, sequence: Sequence, start: int) -> ImageBudget | None:
        """Of a sequence that has tokens of images from `start` on; None: what is left of its prompt is text."""
        return self.images if any(content.end > start for content in sequence.contents) else None

    def plan_encoding(self, sequence: Sequence, step: int) -> None:
        """This step computes nothing of the row but layers of the encoder for one of its images."""
        self.rows.plan_chunk(sequence.row, int(self.rows.planned[sequence.row]), step)

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended, and has a row, from all later plans."""
        self._leave(sequence, ended=True)
        sequence.finish()

    def preempt(self, sequence: Sequence) -> None:
        """Removes a running sequence from all later plans; it returns to the queue once it is released."""
        self._leave(sequence, ended=False)
        sequence.preempt()

    def release_finished(self) -> None:
        """Releases sequences that no step in flight includes; preempted ones return to the queue."""
        still_named = []
        for sequence in self.releasing:
            if self.rows.last_step[sequence.row] > self.committed:
                still_named.append(sequence)
            else:
                self._release(sequence)
        self.releasing = still_named

    def num_releasing_pages(self) -> int:
        """Lower bound of the pages that come back once the steps in flight are committed."""
        return sum(self.kv.num_exclusive(one.lease) for one in self.releasing if one.lease is not None)

    def commit_chunk(self, sequence: Sequence, chunk: PrefillChunk, last_planned: int, *, is_last: bool) -> None:
        """A chunk has been computed: publishes what the prefix cache is to have by now."""
        states = self.kv.states
        if states is not None:
            states.note_computed(chunk.row)
        # With windows each chunk is published, since its first pages are given back before the prompt ends.
        if sequence.state is not SequenceState.RUNNING or not (is_last or chunk.checkpoints or not self.kv.keeps_all):
            return
        self._publish(sequence, chunk.end, last_planned)
        if states is None:
            return
        assert sequence.lease is not None, "a running sequence has a lease"
        for border, slot in chunk.checkpoints:
            states.keep(sequence.lease, border, slot, sequence.kept_states[border])
        if is_last and (border := states.border_of(chunk.end)) in sequence.kept_states:
            states.keep_own(sequence.lease, sequence.kept_states[border])

    def _publish(self, sequence: Sequence, num_tokens: int, last_planned: int) -> None:
        """Publishes the full pages of the first `num_tokens` tokens, all committed, to the prefix cache."""
        assert sequence.lease is not None, "a running sequence has a lease"
        tokens = self.rows.token_ids[sequence.row, :num_tokens]
        swap = self.kv.publish(sequence.lease, sequence.cache_ids(tokens))
        if swap is not None:
            self._changed.append((sequence, swap.entries))
            # A plan made before this commit still reads the old pages; later plans read the new ones.
            self._retiring.append((last_planned, swap.old))
        gone = self.kv.free_out_of_window(np.array([sequence.row]), np.array([num_tokens], dtype=np.int32))
        if gone is not None:
            self._changed.append((sequence, gone))

    def give_back(self, rows: IndexArray) -> None:
        """Frees pages that these rows do not need for their next token; no step in flight includes the rows."""
        totals = self.rows.total.take(rows)
        self.kv.shrink(rows, totals)
        if (gone := self.kv.free_out_of_window(rows, totals - 1)) is not None:
            self.send_entries_again(gone)

    def commit(self, step: int) -> None:
        """A step has been committed: frees the pages that were kept for it alone."""
        self.committed = step
        still_read = []
        for last_read, pages in self._retiring:
            if last_read > step:
                still_read.append((last_read, pages))
            else:
                self.kv.free(pages)
        self._retiring = still_read
        self.release_finished()

    def send_page_changes(self, builder: StepPlanBuilder) -> None:
        """Adds pages that were exchanged since the last plan, or must be set to zero, to the next plan."""
        if self._changed:
            builder.write_older_entries([entries for _, entries in self._changed])
            self._changed = []
        if self._to_zero:
            builder.zero_pages(np.unique(np.concatenate(self._to_zero)))
            self._to_zero = []

    def send_again(self, plan: StepPlan) -> None:
        """Repeats the page changes of a plan that was not executed, for pages still in use or to be set to zero."""
        if len(plan.cleared_pages):
            self._to_zero.append(plan.cleared_pages)
        groups = plan.page_groups if len(plan.page_groups) else np.zeros(len(plan.page_rows), dtype=np.int32)
        self.send_entries_again(TableEntries(groups, plan.page_rows, plan.page_columns, plan.page_ids))

    def send_entries_again(self, entries: TableEntries) -> None:
        """Adds the current values of these entries to the next plan, for rows that go on."""
        for row in np.unique(entries.rows[self.rows.active[entries.rows]]):
            sequence, index = self.rows.sequences[row], np.flatnonzero(entries.rows == row)
            assert sequence is not None, "an active row has a sequence"
            again = self.kv.entries(entries.groups[index], entries.rows[index], entries.columns[index])
            self._changed.append((sequence, again))

    def check(self) -> None:
        """Raises AssertionError unless every law of rows, leases and pages holds."""
        rows = self.rows
        present = [one for one in rows.sequences if one is not None]
        leases = [one.lease for one in present if one.lease is not None]
        assert len(leases) == len(present), "a row without a lease"
        retiring = [pages for _, pages in self._retiring]
        self.kv.check(leases, np.concatenate(retiring) if retiring else NO_INT32)
        if self.images is not None:
            self.images.books.check({one.uid for one in present})
        for one in present:
            row, active = one.row, one.state is SequenceState.RUNNING
            assert rows.sequences[row] is one, "a sequence and its row disagree"
            assert bool(rows.active[row]) == active, "a flag and a state disagree"
            assert bool(rows.ended[row]) == (one.state is SequenceState.ENDED), "a flag and a state disagree"
            assert one.lease is not None, "a row without a lease"
            assert int(self.kv.covered[row]) >= int(rows.planned[row]), "a planned token has no page"
            assert (one in self.releasing) != active, "a sequence is released when it is not active"
            lists = [one in self.prefilling, one in self.awaiting, bool((self._decode_index == row).any())]
            assert sum(lists) == active, "an active sequence prefills, awaits or decodes, another does none of it"
        assert len(np.unique(self._decode_index)) == len(self._decode_index), "a row decodes twice"

    def _leave(self, sequence: Sequence, *, ended: bool) -> None:
        row = sequence.row
        if sequence.state is SequenceState.RUNNING:
            self.releasing.append(sequence)
            if sequence in self.prefilling:
                self.prefilling.remove(sequence)
            elif sequence.pooling is not None:
                self.awaiting.remove(sequence)
            else:
                self._decode_index = self._decode_index[self._decode_index != row]
                self._decode_arrays = None
        self.rows.deactivate(row, ended=ended)

    def _release(self, sequence: Sequence) -> None:
        row, rows = sequence.row, self.rows
        assert sequence.lease is not None, "a sequence with a row has a lease"
        tokens = rows.tokens_of(row)
        computed = 0 if sequence.failed else min(int(rows.planned[row]), len(tokens))
        resumes = sequence.state is SequenceState.PREEMPTED
        freed = self.kv.release(sequence.lease, sequence.cache_ids(tokens[:computed]), resumes=resumes)
        if sequence.failed:
            self._to_zero.append(freed)
        self._changed = [entry for entry in self._changed if entry[0] is not sequence]
        if self.images is not None:
            self.images.leave(sequence)
        rows.vacate(sequence)
        if sequence.state is SequenceState.PREEMPTED:
            sequence.requeue(tokens.copy())
            self._queue.push(sequence)
        else:
            sequence.vacate()
