"""What the next step computes: decode rows, prompt chunks within the token budget (chunked prefill), and which
sequences are admitted or preempted."""

from __future__ import annotations

import numpy as np

from minisgl_backend.arrays import BoolArray, IndexArray, Int32Array, Int64Array
from minisgl_backend.scheduler.admission import AdmissionControl, Forecast
from minisgl_backend.scheduler.background import BackgroundShare
from minisgl_backend.scheduler.drafting import Drafting
from minisgl_backend.scheduler.fairness import FairShares
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.policy import WaitingQueue
from minisgl_backend.scheduler.prompt_budget import PromptBudget
from minisgl_backend.scheduler.rows import ends_early, limit_of
from minisgl_backend.scheduler.running import RunningSet
from minisgl_backend.scheduler.sequence import Sequence, SequenceState, preempted_first
from minisgl_backend.scheduler.step_plan_builder import StepPlanBuilder
from minisgl_backend.step import StepPlan

# The least length of a chunk that does not end its prompt, unless it is the step's first: shorter ones cost a step more
# than they compute. Chunks of background requests may be shorter.
MIN_LATER_CHUNK, MIN_LATER_BACKGROUND_CHUNK = 64, 8


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
        self._admission = admission
        self._prompts = PromptBudget(limits)
        self.background = BackgroundShare(limits.background_slowdown, limits.step_times)
        self._forecast: Forecast | None = None  # for this step's admissions, made when first needed
        self._admits = True  # false in a step that preempted: pages freed so are not for the queue
        self._refused_at = (-1, -1)  # versions of KV pages and queue at which the last admission failed
        self.num_admissions = 0
        self.num_preemptions = 0
        self.prompt_tokens = 0  # of requests at their first admission
        self.cached_tokens = 0  # those of them that the prefix cache supplied

    def plan(self, step: int) -> StepPlan | None:
        """The step with this number, or None when nothing can run now."""
        builder = StepPlanBuilder(self._running.kv.groups.num_groups)
        self._admits = True
        if self._shares is not None:
            self._make_way(self._shares)
        if self._drafting is not None and not self.prompts_wait:
            self._drafting.plan_proposals(builder, step)
        has_background = builder.empty and self._mixes_background()
        if has_background:
            self._make_way_for_others()
            self._plan_with_background(builder, step)
        if builder.empty:
            self._plan_uniform(builder, step)
        if builder.empty:
            if self._running.kv.has_windows:  # rows may have given pages back even so
                self._running.send_entries_again(builder.entries)
            return None
        self._running.send_page_changes(builder)
        plan = builder.build(step)
        if has_background:
            self.background.note_plan(plan, self._running.rows.background)
        return plan

    def _plan_uniform(self, builder: StepPlanBuilder, step: int) -> None:
        """A step without background requests, or with nothing else: all sequences are treated alike."""
        if self._limits.mixed_prefill_length == 0:  # no mixed batches: prefill first
            self._plan_prefill(builder, self._limits.max_prefill_length, step)
            if builder.empty:
                self._plan_decode(builder, step)
            return
        self._plan_decode(builder, step)
        if self._running.prefilling or self._queue.num_tokens or self._prompts.in_backlog:
            self._plan_prefill(builder, self._prompts.budget(builder.num_decoding, self._queue.num_tokens), step)

    def _plan_with_background(self, builder: StepPlanBuilder, step: int) -> None:
        """A step in which background requests get their share and all others as much as they can use."""
        running, longest = self._running, self._limits.max_prefill_length
        in_background = int(running.rows.background.take(running.decode_index).sum())
        decoding = len(running.decode_index) - in_background
        waiting, prompts_first = self._queue.num_other_tokens, self._limits.mixed_prefill_length == 0
        prompts = running.num_begun_tokens() + waiting
        budget = longest if prompts_first else self._prompts.budget(decoding, waiting)
        if prompts_first and prompts:
            self._plan_prefill(builder, budget, step, background=False)
            if not builder.empty:
                return
        most_rows, most = self.background.of_step(decoding, min(budget, prompts), in_background)
        self._plan_decode(builder, step, most_rows)
        self._plan_prefill(builder, budget, step, background=False)
        left = min(most, budget - builder.num_prefill_tokens)
        if left > 0:
            self._plan_prefill(builder, left, step, background=True)

    def _mixes_background(self) -> bool:
        queue, rows = self._queue, self._running.rows
        if not (rows.num_background or queue.num_background_tokens):
            return False
        return queue.num_other_tokens > 0 or bool((rows.active & ~rows.background).any())

    def _make_way_for_others(self) -> None:
        """Preempts background sequences where another sequence waits for a row or for pages."""
        running, queue = self._running, self._queue
        if not running.rows.num_background or not queue.num_other_tokens or running.releasing:
            return
        self._begin_round()
        head = queue.head()
        if head is None or head.is_background:
            return
        self._forecast, pages = None, running.kv.groups.pages_of_row(len(head.token_ids))
        if running.rows.num_free and self._fits(head, pages):
            return
        missing = pages - running.kv.num_available
        for victim in sorted((one for one in running.active() if one.is_background), key=preempted_first)[::-1]:
            self.num_preemptions += 1
            running.preempt(victim)
            missing -= running.kv.num_private(victim.lease) if victim.lease is not None else 0
            if missing <= 0:
                break
        self._refused_at = (-1, -1)
        running.release_finished()

    def _plan_decode(self, builder: StepPlanBuilder, step: int, most_background: int | None = None) -> None:
        """`most_background`: decode at most that many background rows, the oldest; None: all rows decode."""
        running = self._running
        state, index = running.rows, running.decode_index
        if not len(index):
            return
        rows, uids = running.decode_arrays
        lengths = state.planned.take(index) + 1
        keep = lengths < state.limit.take(index)
        if most_background is not None:
            background = state.background.take(index)
            keep &= ~background | (np.cumsum(background) <= most_background)
        if False in keep:
            index, rows, uids, lengths = index[keep], rows[keep], uids[keep], lengths[keep]
        short = (lengths > running.kv.covered.take(index)).nonzero()[0]
        if running.kv.has_windows and len(short):
            # Where a row's next token begins a page, its windows have left other pages behind, for the token before,
            # too. Rows whose last prompt chunk is in flight are left out: their pages are published first.
            ready = short[state.sampled.take(index[short])]
            gone = running.kv.trim(index[ready], (lengths[ready] - 1) // np.int32(self._limits.page_size))
            if gone is not None:
                builder.write_entries(gone)
        if len(short) and len(short) * running.kv.groups.num_groups > running.kv.num_available:
            if self._drafting is not None and running.committed == step - 1:
                running.give_back(index)  # pages kept for drafts
            keep = self._make_room(index, short)
            index, rows, uids, lengths = index[keep], rows[keep], uids[keep], lengths[keep]
            short = np.flatnonzero(lengths > running.kv.covered.take(index))
        if len(short):
            columns, pages = running.kv.extend(index[short])
            builder.write_pages(rows[short], columns, pages)
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
            if len(short) * running.kv.groups.num_groups > running.kv.num_available:
                longest[short] = running.kv.covered.take(index[short])  # drafts never preempt
                break
            columns, pages = running.kv.extend(index[short])
            builder.write_pages(rows[short], columns, pages)
        drafts = [(at, tokens[: longest[at] - lengths[at]]) for at, tokens in drafts]
        running.rows.plan_decode(index, longest, step)
        drafted = drafting.expand(rows, uids, lengths, drafts)
        builder.decode(drafted.rows, drafted.uids, drafted.lengths, drafted.draft_tokens)

    def _make_room(self, index: IndexArray, short: IndexArray) -> BoolArray:
        """Preempts until each row of `index[short]` can get a page, now or once steps in flight have ended.

        Returns which of `index` can be planned now, bool [num_rows]; the others are preempted or wait for one step.
        """
        running, num_groups = self._running, self._running.kv.groups.num_groups
        needing = index[short]
        while True:
            needing = needing[running.rows.active[needing]]
            if len(needing) * num_groups <= running.kv.num_available + running.num_releasing_pages():
                break
            active = running.active()
            if len(active) <= 1:
                break  # only pages that steps in flight still hold are missing
            self._preempt(max(active, key=preempted_first))
        served = sorted((running.rows.sequences[row] for row in needing), key=preempted_first)  # type: ignore[type-var]
        waiting = [one.row for one in served[running.kv.num_available // num_groups :] if one is not None]
        keep = running.rows.active[index]
        keep[np.isin(index, waiting)] = False
        return keep

    def _preempt(self, victim: Sequence) -> None:
        """Preemption by recomputation: the pages go to the prefix cache, the sequence waits with all its tokens."""
        self.num_preemptions += 1
        self._admits = False
        self._admission.saw_preemption()
        self._running.preempt(victim)
        self._running.release_finished()

    def _make_way(self, shares: FairShares) -> None:
        """Preempts for a tenant below its guaranteed rows, where it waits for a row or for pages."""
        running = self._running
        if not self._queue.num_tokens or running.releasing:
            return
        active = running.active()
        shares.note_running(active)
        if not shares.is_anyone_short():
            return
        self._queue.begin_round(self.num_admissions)
        victims = shares.victims(active)
        head = self._queue.head()
        if not victims or head is None:
            return
        # Each victim makes way for one sequence like the head; none is needed for those that already fit.
        self._forecast, pages, fitting = None, running.kv.groups.pages_of_row(len(head.token_ids)), 0
        while fitting < min(len(victims), running.rows.num_free) and self._fits(head, pages, pages * fitting):
            fitting += 1
        if fitting:
            self._refused_at = (-1, -1)
        freed = sum(running.kv.num_private(one.lease) for one in victims[fitting:] if one.lease is not None)
        if pages > running.kv.num_available + freed:
            return  # preempting all of them would not make enough room
        for victim in victims[fitting:]:
            self.num_preemptions += 1
            running.preempt(victim)
        running.release_finished()

    def _plan_prefill(
        self, builder: StepPlanBuilder, budget: int, step: int, *, background: bool | None = None
    ) -> None:
        """Chunked prefill: continues prompts that have begun, then admits, within the budget. `background`: True: only
        background requests, False: only others, None: all."""
        running = self._running
        for sequence in list(running.prefilling):
            if sequence.state is not SequenceState.RUNNING:
                continue  # it was preempted for an earlier prompt's pages
            if background is not None and sequence.is_background is not background:
                continue
            start = int(running.rows.planned[sequence.row])
            end = self._chunk_end(sequence, start, budget, builder)
            if end == start:
                return
            if running.kv.has_windows and (end := self._within_pages(sequence, start, end)) == start:
                continue
            running.plan_chunk(sequence, end, step, builder)
            budget -= end - start
        if budget > 0 and self._may_admit():
            self._admit(builder, budget, step, background)

    def _chunk_end(self, sequence: Sequence, start: int, budget: int, builder: StepPlanBuilder) -> int:
        """Where a chunk that begins at `start` ends; `start` if it should not begin."""
        if start + budget >= (total := len(sequence.token_ids)):
            return total
        least = MIN_LATER_BACKGROUND_CHUNK if sequence.is_background else MIN_LATER_CHUNK
        return start + budget if not builder.has_prefill or budget >= least else start

    def _within_pages(self, sequence: Sequence, start: int, end: int) -> int:
        """The end of a chunk as far as groups with windows have pages for it; `start` where it has to wait for pages.

        Where there is no page for even one token, sequences that were admitted later are preempted.
        """
        running, kv, needed = self._running, self._running.kv, self._running.kv.groups.num_windows
        while True:
            if (reached := min(end, kv.reach(sequence.row))) > start:
                return reached
            victim = max(running.active(), key=preempted_first)
            if victim is sequence or kv.num_available + running.num_releasing_pages() >= needed:
                return start
            self._preempt(victim)

    @property
    def prompts_wait(self) -> bool:
        """Whether the next step has prompts to compute: their first tokens have precedence over drafts."""
        return bool(self._running.prefilling) or self._may_admit()

    def _may_admit(self) -> bool:
        """Whether an admission can succeed: a sequence waits, a row is free, and pages or the queue have changed since
        the last attempt failed."""
        if not (self._admits and self._queue.num_tokens and self._running.rows.num_free):
            return False
        return self._refused_at != (self._running.kv.version, self._queue.version)

    def _admit(self, builder: StepPlanBuilder, budget: int, step: int, background: bool | None) -> None:
        running = self._running
        self._begin_round()
        self._forecast = None
        while budget > 0 and running.rows.num_free:
            sequence = self._queue.head()
            if sequence is None or (background is not None and sequence.is_background is not background):
                return
            chunk = self._try_start(builder, sequence, budget)
            if chunk is None:
                return
            start, end = chunk
            running.plan_chunk(sequence, end, step, builder)
            budget -= end - start

    def _begin_round(self) -> None:
        if self._shares is not None:
            self._shares.note_running(self._running.active())
        self._queue.begin_round(self.num_admissions)

    def _try_start(self, builder: StepPlanBuilder, sequence: Sequence, budget: int) -> tuple[int, int] | None:
        """Starts the head of the queue. Returns its cached tokens and its first chunk's end; None where it cannot or
        should not start now."""
        running, tokens, kv = self._running, sequence.token_ids, self._running.kv
        # The last token is always computed, since its hidden state is needed.
        usable = tokens[:-1] if sequence.reads_cache else tokens[:0]
        match = kv.match(sequence.cache_ids(usable), sequence.params.cache_salt)
        cached = match.num_pages * self._limits.page_size
        end = self._chunk_end(sequence, cached, budget, builder)
        if kv.has_windows and not running.num_active:  # nothing else runs: start if it fits at all
            end = min(end, kv.first_reach(match, len(tokens)))
            new_pages = kv.pages_to_take(match, len(tokens), end)
        else:
            new_pages = kv.pages_to_start(match, len(tokens), end)
        too_short = end <= cached
        if too_short or not self._fits(sequence, new_pages):
            kv.unmatch(match)
            if not too_short:  # else the next step's budget may be enough
                self._refused_at = (kv.version, self._queue.version)
            return None
        self._queue.remove(sequence)
        if not sequence.resumed and sequence.tells_prompt:  # pages shared with siblings are not counted as cache hits
            self.prompt_tokens += sequence.prompt_len
            self.cached_tokens += cached
        running.start(sequence, match, end, self.num_admissions, builder)
        if self._shares is not None:
            self._shares.note_admitted(sequence.tenant, sequence.row, len(tokens) - cached, self.num_admissions)
        self.num_admissions += 1
        return cached, end

    def _fits(self, sequence: Sequence, new_pages: int, promised: int = 0) -> bool:
        """Whether there are pages for the prompt now, and probably later for the expected growth of all sequences.
        `promised`: pages that are reserved for others."""
        available = self._running.kv.num_available - promised
        if new_pages > available:
            return False
        if not self._running.num_active:
            return True
        if self._forecast is None:
            self._forecast = self._make_forecast()
        prompt, total = sequence.prompt_len, len(sequence.token_ids)
        most = limit_of(sequence, self._running.max_length) - total
        if self._forecast.admits(most, new_pages, available):
            return True
        remaining = self._admission.expected_remaining(
            np.array([self.num_admissions]),
            np.array([total - prompt]),
            np.array([most]),
            np.array([ends_early(sequence)]),
        )
        return self._forecast.admits(int(remaining[0]), new_pages, available)

    def _make_forecast(self) -> Forecast:
        state = self._running.rows
        index = np.flatnonzero(state.active)
        total, prompt, limit = state.total[index], state.prompt_len[index], state.limit[index]
        remaining = self._admission.expected_remaining(
            state.admission[index], total - prompt, limit - total, state.ends_early[index]
        )
        kv = self._running.kv
        growth = kv.window_growth(index, total + remaining)
        return Forecast(
            remaining, kv.freed_pages(index), self._limits.page_size, kv.groups.num_full, window_growth=growth
        )
