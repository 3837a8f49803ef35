"""What the next step computes: decode rows, prompt chunks within the token budget (chunked prefill), and which
sequences are admitted or preempted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from minisgl_backend.arrays import IndexArray, Int32Array, Int64Array
from minisgl_backend.scheduler.admission import AdmissionControl
from minisgl_backend.scheduler.admitter import Admitter, chunk_end
from minisgl_backend.scheduler.background import BackgroundShare
from minisgl_backend.scheduler.drafting import Drafting
from minisgl_backend.scheduler.fairness import FairShares
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.policy import WaitingQueue
from minisgl_backend.scheduler.preemption import Preemption
from minisgl_backend.scheduler.prompt_budget import PromptBudget
from minisgl_backend.scheduler.running import RunningSet
from minisgl_backend.scheduler.sequence import SequenceState
from minisgl_backend.scheduler.step_plan_builder import StepPlanBuilder
from minisgl_backend.step import StepPlan


class Share(NamedTuple):
    """What some of the sequences may have of a step."""

    decodes: bool = False
    max_background_rows: int | None = None  # of background rows only so many decode, the oldest; None: all
    prompt_tokens: int = 0
    background: bool | None = None  # whose prompts: True: background requests' only, False: others' only, None: all


DECODES = Share(decodes=True)


class Planner:
    """Makes plans. Changes the running set and takes from the queue; both belong to the scheduler."""

    def __init__(
        self,
        limits: SchedulerLimits,
        running: RunningSet,
        queue: WaitingQueue,
        admission: AdmissionControl,
        shares: FairShares | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        """`shares`: where tenants have fair shares; `queue` is then its. `drafting`: where there is speculation."""
        self._drafting = drafting
        self._shares = shares
        self._limits = limits
        self._running = running
        self._queue = queue
        self._prompts = PromptBudget(limits)
        self.preemption = Preemption(running, admission)
        self.admitter = Admitter(limits, running, queue, admission, self.preemption, shares)
        self._preempted_before = 0  # this step, for running sequences
        self.background = BackgroundShare(limits.background_slowdown, running.steps.estimate)

    def plan(self, step: int) -> StepPlan | None:
        """The step with this number, or None when nothing can run now."""
        builder = StepPlanBuilder(self._running.kv.groups.num_pages)
        self._preempted_before = self.preemption.num_for_running
        if self._shares is not None:
            self.admitter.preempt_for_fair_share(self._shares)
        if self._drafting is not None and not self.prompts_wait:
            self._drafting.plan_proposals(builder, step)
        has_background = builder.empty and self._mixes_background()
        if has_background:
            self.admitter.preempt_for_priority()
            self._plan_shares(builder, step, self._shares_with_background(builder))
        if builder.empty:
            self._plan_shares(builder, step, self._shares_of_all(builder))
        if builder.empty:
            self._running.send_entries_again(builder.entries)  # rows may have given pages back even so
            return None
        self._running.send_page_changes(builder)
        images = self._running.images
        plan = builder.build(step, () if images is None else images.books.take_freed())
        if has_background or images is not None:
            self._running.steps.note_plan(plan, self._running.rows.background)
        return plan

    def _plan_shares(self, builder: StepPlanBuilder, step: int, shares: Iterator[Share]) -> None:
        for share in shares:
            if share.decodes:
                self._plan_decode(builder, step, share.max_background_rows)
            if share.prompt_tokens > 0:
                self._plan_prefill(builder, share.prompt_tokens, step, background=share.background)

    def _shares_of_all(self, builder: StepPlanBuilder) -> Iterator[Share]:
        """Without background requests, or with nothing else: all sequences are treated alike."""
        if self._limits.mixed_prefill_length == 0:  # no mixed batches: prefill first
            yield Share(prompt_tokens=self._limits.max_prefill_length)
            if builder.empty:
                yield DECODES
            return
        yield DECODES
        if self._running.prefilling or self._queue.num_tokens or self._prompts.in_backlog:
            yield Share(prompt_tokens=self._prompts.budget(builder.num_decoding, self._queue.num_tokens))

    def _shares_with_background(self, builder: StepPlanBuilder) -> Iterator[Share]:
        """Background requests get their share and all others as much as they can use."""
        running, longest = self._running, self._limits.max_prefill_length
        in_background = int(running.rows.background.take(running.decode_index).sum())
        decoding = len(running.decode_index) - in_background
        waiting, prompts_first = self._queue.num_other_tokens, self._limits.mixed_prefill_length == 0
        prompts = running.num_begun_tokens() + waiting
        budget = longest if prompts_first else self._prompts.budget(decoding, waiting)
        if prompts_first and prompts:
            yield Share(prompt_tokens=budget, background=False)
            if not builder.empty:
                return
        max_rows, max_tokens = self.background.of_step(decoding, min(budget, prompts), in_background)
        yield Share(decodes=True, max_background_rows=max_rows, prompt_tokens=budget, background=False)
        yield Share(prompt_tokens=min(max_tokens, budget - builder.num_prefill_tokens), background=True)

    def _mixes_background(self) -> bool:
        queue, rows = self._queue, self._running.rows
        if not (rows.num_background or queue.num_background_tokens):
            return False
        return queue.num_other_tokens > 0 or bool((rows.active & ~rows.background).any())

    def _plan_decode(self, builder: StepPlanBuilder, step: int, max_background: int | None) -> None:
        running = self._running
        state, index = running.rows, running.decode_index
        if not len(index):
            return
        rows, uids = running.decode_arrays
        lengths = state.planned.take(index) + 1
        keep = lengths < state.limit.take(index)
        if max_background is not None:
            background = state.background.take(index)
            keep &= ~background | (np.cumsum(background) <= max_background)
        if False in keep:
            index, rows, uids, lengths = index[keep], rows[keep], uids[keep], lengths[keep]
        kv = running.kv
        short = (lengths > kv.covered.take(index)).nonzero()[0]
        if len(short):
            if not kv.keeps_all:
                # Where a row's next token begins a page, its windows have left other pages behind, for the token
                # before, too. Rows whose last prompt chunk is in flight are left out: their pages are published first.
                ready = short[state.sampled.take(index[short])]
                if (gone := kv.free_out_of_window(index[ready], lengths[ready] - 1)) is not None:
                    builder.write_entries(gone)
            if len(short) > kv.num_extendable:
                if self._drafting is not None and running.committed == step - 1:
                    running.give_back(index)  # pages kept for drafts
                keep = self.preemption.for_pages(index, short)
                index, rows, uids, lengths = index[keep], rows[keep], uids[keep], lengths[keep]
                short = np.flatnonzero(lengths > kv.covered.take(index))
            if len(short):
                columns, pages = kv.extend(index[short])
                builder.write_pages(rows[short], columns, pages)
        if kv.states is not None and (folds := kv.states.fold(index, lengths)) is not None:
            builder.fold(folds)
        if self._drafting is not None and not self.prompts_wait:
            self._plan_drafts(self._drafting, builder, step, index, (rows, uids, lengths))
            return
        state.plan_decode(index, lengths, step)
        builder.decode(rows, uids, lengths)

    def _plan_drafts(
        self,
        drafting: Drafting,
        builder: StepPlanBuilder,
        step: int,
        index: IndexArray,
        entries: tuple[Int32Array, Int64Array, Int32Array],
    ) -> None:
        """The decode part, with as many drafts as there are pages for."""
        running, (rows, uids, lengths) = self._running, entries
        drafts = drafting.propose(index, lengths, all_committed=running.committed == step - 1)
        if not drafts:
            running.rows.plan_decode(index, lengths, step)
            builder.decode(rows, uids, lengths)
            return
        longest = lengths.copy()
        for position, tokens in drafts:
            longest[position] += len(tokens)
        while len(short := np.flatnonzero(longest > running.kv.covered.take(index))):
            if len(short) > running.kv.num_extendable:
                longest[short] = running.kv.covered.take(index[short])  # drafts never preempt
                break
            columns, pages = running.kv.extend(index[short])
            builder.write_pages(rows[short], columns, pages)
        drafts = [(at, tokens[: longest[at] - lengths[at]]) for at, tokens in drafts]
        running.rows.plan_decode(index, longest, step)
        drafted = drafting.expand(rows, uids, lengths, drafts)
        builder.decode(drafted.rows, drafted.uids, drafted.lengths, drafted.draft_tokens)

    def _plan_prefill(
        self, builder: StepPlanBuilder, budget: int, step: int, *, background: bool | None = None
    ) -> None:
        """Chunked prefill: continues prompts that have begun, then admits, within the budget. `background`: True: only
        background requests, False: only others, None: all."""
        running = self._running
        if running.images is not None and not (builder.has_prefill or builder.num_encoding):
            # Once a step: a second share of prompts has what the first has left.
            running.images.share.begin(step, builder.num_decoding, is_limited=not self._prompts.in_backlog)
        for sequence in list(running.prefilling):
            if sequence.state is not SequenceState.RUNNING:
                continue  # it was preempted for an earlier prompt's pages
            if background is not None and sequence.is_background is not background:
                continue
            start = int(running.rows.planned[sequence.row])
            images = running.images_ahead(sequence, start)
            if images is not None and not builder.has_prefill:
                budget = max(budget, images.long_chunk(sequence, start, self._limits.max_prefill_length))
            end = chunk_end(sequence, start, budget, builder, self._limits.chunk_multiple)
            if end == start:
                return
            if images is not None:
                end = images.whole_spans(sequence, start, end)
                end, spent = images.reach(sequence, sequence.row, start, end, budget, builder, step)
                budget -= spent
                if spent and end == start:
                    running.plan_encoding(sequence, step)
                if end == start:
                    continue
            end = self.preemption.for_window_pages(sequence, start, end)
            if images is not None:
                end = images.before_spans(sequence, start, end)
            if end == start:
                continue
            running.plan_chunk(sequence, end, step, builder)
            budget -= end - start
        if budget > 0 and self._may_admit():
            self.admitter.admit(builder, budget, step, background)

    def _may_admit(self) -> bool:
        """Pages that were taken back in this step are not for the queue."""
        return self.preemption.num_for_running == self._preempted_before and self.admitter.may_admit()

    @property
    def prompts_wait(self) -> bool:
        """Whether the next step has prompts to compute: their first tokens have precedence over drafts."""
        return bool(self._running.prefilling) or self._may_admit()
