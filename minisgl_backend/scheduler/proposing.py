"""Steps of a proposer that runs on the device: which rows they propose for, and what its layers still have to compute.

A proposer step is planned after the model's previous step is committed, so its lengths and tokens are known ones. The
proposer's layers keep their keys and values in the sequence's pages, at the same slots as the model's. They are
computed lazily, with the first step that proposes for the row. They never affect the text: a page that the proposer
has not computed, or has computed from rejected tokens, costs acceptance only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl_backend.arrays import NO_INT32, BoolArray, IndexArray, Int32Array
from minisgl_backend.scheduler.forced_drafts import ForcedDrafts
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.running import RunningSet
from minisgl_backend.scheduler.step_plan_builder import StepPlanBuilder
from minisgl_backend.speculation.control import DraftControl
from minisgl_backend.speculation.proposer import DeviceProposals
from minisgl_backend.step import PrefillChunk, StepPlan, StepResult, Wants

DECIDE_EVERY = 4  # proposer turns between two decisions on whether speculation pays
# While it is off: steps after which some rows get proposals, to be compared with the tokens that come.
SHADOW_EVERY, SHADOWED = 128, 4
SHORT_LAG = 16  # tokens of a row computed as decode entries, as captured in graphs; more than that are a prefill chunk


@dataclass(frozen=True)
class _Seen:
    """How much of a row the proposer's layers have computed."""

    admission: int  # of the sequence; for another sequence nothing is computed
    count: int  # leading tokens that are computed
    guessed: Int32Array  # proposals computed after them; valid as far as they were accepted


class ProposerSteps:
    """Used by `Drafting`."""

    def __init__(
        self,
        limits: SchedulerLimits,
        running: RunningSet,
        proposals: DeviceProposals,
        control: DraftControl,
        forced: ForcedDrafts,
    ) -> None:
        """`forced`: drafts that grammars force, which need no step."""
        self._limits, self._running, self._forced = limits, running, forced
        self._proposals, self._control = proposals, control
        longest = running.max_length if limits.longest_drafted is None else limits.longest_drafted
        self._longest = min(longest, running.max_length)
        self._seen: dict[int, _Seen] = {}  # by row
        self._pages = _SeenPages(limits) if proposals.catches_up and running.kv.keeps_all else None
        self._turns = self._plain_turns = self._next_shadow = 0
        self._was_last = False  # the last step was the proposer's, so the next one is the model's

    @property
    def is_due(self) -> bool:
        """While speculation is off: whether it is time to measure how good the proposals would be."""
        return self._plain_turns >= SHADOW_EVERY

    def plan(self, builder: StepPlanBuilder, step: int) -> bool:
        """Whether the next step is the proposer's; if so, fills the builder."""
        running, state, control = self._running, self._running.rows, self._control
        index, room = running.decode_index, self._limits.most_draft_entries - len(running.decode_index)
        index = index[state.may_draft.take(index)]
        self._turns += 1
        if self._turns % DECIDE_EVERY == 0 or not len(index) or room < 1:
            rows, uids = index.tolist(), state.uid.take(index).tolist()
            control.decide_depth(rows, uids, len(running.decode_index), room)
        if not len(index) or room < 1:
            self._plain_turns = 0  # nothing waits for what is not to be
            return False
        if not control.is_on:
            self._plain_turns += 1
        if running.committed != step - 1 or self._was_last or not (control.is_on or self.is_due):
            return False
        if control.is_on:
            index = self._forced.without_any(index)
        else:
            index = np.roll(index, -self._next_shadow)[:SHADOWED]
        depth = control.depth
        totals = state.total.take(index)
        index = index[(totals < state.limit.take(index)) & (totals + depth <= self._longest)]
        index = self._take_pages(index, depth, builder)
        is_proposers = self._fill(builder, index, depth, step)
        if not control.is_on and (builder.num_decoding or not is_proposers):  # else more is to compute first
            self._plain_turns = 0
            self._next_shadow += SHADOWED
        return is_proposers

    def take(self, plan: StepPlan, result: StepResult) -> list[tuple[int, int, int, Int32Array]]:
        """The result of a step: (row, uid, length of the sequence, proposed tokens that would follow)."""
        state, rows = self._running.rows, plan.decode_rows.tolist()
        if result.proposed is None or result.failed_rows:  # what the pages hold does not matter
            for row in {*rows, *(chunk.row for chunk in plan.prefill)}:
                self._seen.pop(row, None)
            return []
        for chunk in plan.prefill:
            self._note(chunk.row, chunk.end)
        found = []
        uids, totals = plan.decode_uids.tolist(), plan.decode_lengths.tolist()
        for row, uid, total, tokens in zip(rows, uids, totals, result.proposed, strict=False):
            if state.active[row]:
                self._note(row, total, tokens[:-1])
                self._proposals.note(row, uid, total, tokens)
                found.append((row, uid, total, tokens))
        return found

    def note_plan(self, plan: StepPlan) -> None:
        """A step of the proposer or of the model has been planned."""
        self._was_last = plan.num_proposed > 0
        if self._pages is not None and len(plan.page_ids):
            self._pages.note_new(plan, self._running.rows.total)

    def _take_pages(self, index: IndexArray, depth: int, builder: StepPlanBuilder) -> IndexArray:
        """Those of the rows that have or get pages for the tokens to be computed. Nothing is preempted for it."""
        kv, totals = self._running.kv, self._running.rows.total.take(index)
        if (gone := kv.free_out_of_window(index, totals - 1)) is not None:
            builder.write_entries(gone)  # otherwise written when a row needs a page, but these rows have pages ahead
        longest = totals + np.int32(depth - 1)
        missing = -(-np.maximum(longest - kv.covered.take(index), 0) // kv.page_size)
        fits = np.cumsum(missing) * kv.groups.num_pages <= kv.num_available
        index, longest = index[fits], longest[fits]
        while len(short := index[longest > kv.covered.take(index)]):
            columns, pages = kv.extend(short)
            builder.write_pages(short.astype(np.int32), columns, pages)
        return index

    def _fill(self, builder: StepPlanBuilder, index: IndexArray, depth: int, step: int) -> bool:
        """Fills in the step's entries and chunks, within its token budget."""
        state = self._running.rows
        entries_left = self._limits.most_draft_entries - len(index)
        tokens_left = self._limits.max_prefill_length
        ready: list[int] = []
        late_rows: list[int] = []
        late_lengths: list[int] = []
        for row in index.tolist():
            total = int(state.total[row])
            seen = self._seen_of(row, total)
            if (lag := total - 1 - seen) <= min(SHORT_LAG, entries_left):
                entries_left -= lag
                late_rows += [row] * lag
                late_lengths += range(seen + 1, total)
            elif tokens_left:
                end = min(total - 1, seen + tokens_left)
                tokens_left -= end - seen
                builder.add_chunk(PrefillChunk(row, seen, state.token_ids[row, seen:end].copy(), Wants.NOTHING))
                if end < total - 1:
                    continue
            else:
                continue
            ready.append(row)
        if not ready and not builder.has_prefill:
            return False
        rows = np.array([*ready, *late_rows], dtype=np.int32)
        lengths = np.concatenate([state.total.take(ready), np.array(late_lengths, dtype=np.int32)]).astype(np.int32)
        builder.decode(rows, state.uid.take(rows), lengths)
        builder.propose(depth, len(ready))
        state.plan_proposing(index, step)
        return True

    def _seen_of(self, row: int, total: int) -> int:
        """Number of a row's leading tokens that the proposer's layers have computed, the last token not counted."""
        if not self._proposals.catches_up:
            return total - 1
        state, seen = self._running.rows, self._seen.get(row)
        if seen is None or seen.admission != state.admission[row]:
            lease = self._lease_pages(row)
            return 0 if self._pages is None else min(self._pages.leading(lease, total - 1), total - 1)
        came = state.token_ids[row, seen.count : min(seen.count + len(seen.guessed), total)]
        wrong = np.flatnonzero(came != seen.guessed[: len(came)])
        return min(seen.count + (int(wrong[0]) if len(wrong) else len(came)), total - 1)

    def _note(self, row: int, count: int, guessed: Int32Array = NO_INT32) -> None:
        if not self._proposals.catches_up:
            return
        admission, before = int(self._running.rows.admission[row]), self._seen.get(row)
        first = before.count if before is not None and before.admission == admission else 0
        self._seen[row] = _Seen(admission, count, guessed)
        if self._pages is not None:
            self._pages.note_seen(self._lease_pages(row), first, count)

    def _lease_pages(self, row: int) -> Int32Array:
        """The row's pages in order, int32 [num_pages], for a model with one cache group."""
        sequence = self._running.rows.sequences[row]
        assert sequence is not None, "a row that is planned keeps its sequence"
        assert sequence.lease is not None, "a row has a lease"
        pages: Int32Array = self._running.kv.pages_of(sequence.lease)[0]
        return pages


class _SeenPages:
    """Which pages hold the proposer's keys and values of all their tokens: for prefixes from the cache, this says
    whether the proposer has to compute them."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._page_size = limits.page_size
        self._seen: BoolArray = np.zeros(limits.num_pages + 1, dtype=np.bool_)

    def note_new(self, plan: StepPlan, totals: Int32Array) -> None:
        """Pages handed out for new tokens lose their mark; those that the cache supplies keep it. `totals`: known
        tokens, by row."""
        known = totals.take(plan.page_rows) - 1
        for admitted in plan.admitted:
            known[plan.page_rows == admitted.row] = admitted.cached_len
        is_new = (plan.page_columns + 1) * self._page_size > known
        self._seen[plan.page_ids[is_new]] = False

    def note_seen(self, pages: Int32Array, first: int, count: int) -> None:
        """The proposer has computed tokens `first` to `count` - 1 of a row with these pages, and all before them."""
        self._seen[pages[first // self._page_size : count // self._page_size]] = True

    def leading(self, pages: Int32Array, total: int) -> int:
        """Tokens of the leading computed pages, for a row with these pages and `total` tokens."""
        unseen = np.flatnonzero(~self._seen[pages[: total // self._page_size]])
        return (int(unseen[0]) if len(unseen) else total // self._page_size) * self._page_size
