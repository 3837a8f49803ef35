"""Admission: which waiting sequences get a row and pages, when there is room for what they will need."""

from __future__ import annotations

import numpy as np

from minisgl_backend.scheduler.admission import AdmissionControl, Forecast
from minisgl_backend.scheduler.fairness import FairShares
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.policy import WaitingQueue
from minisgl_backend.scheduler.preemption import Preemption
from minisgl_backend.scheduler.rows import ends_early, limit_of
from minisgl_backend.scheduler.running import RunningSet
from minisgl_backend.scheduler.sequence import Sequence
from minisgl_backend.scheduler.step_plan_builder import StepPlanBuilder

# The least length of a chunk that does not end its prompt, unless it is the step's first: shorter ones cost a step more
# than they compute. Chunks of background requests may be shorter.
MIN_LATER_CHUNK, MIN_LATER_BACKGROUND_CHUNK = 64, 8
NEVER = (-1, -1, -1)


def chunk_end(sequence: Sequence, start: int, budget: int, builder: StepPlanBuilder, multiple: int = 1) -> int:
    """Where a chunk that begins at `start` ends; `start` if it should not begin. `multiple`: see `SchedulerLimits`; the
    first chunk of a step has one whatever the budget, so that every prompt goes on."""
    if start + budget >= (total := len(sequence.token_ids)):
        return total
    least = max(multiple, MIN_LATER_BACKGROUND_CHUNK if sequence.is_background else MIN_LATER_CHUNK)
    if builder.has_prefill and budget < least:
        return start
    return min(start + max(budget // multiple, 1) * multiple, total)


class Admitter:
    """Admits, and has others preempted for what waits. Changes the running set and takes from the queue."""

    def __init__(
        self,
        limits: SchedulerLimits,
        running: RunningSet,
        queue: WaitingQueue,
        control: AdmissionControl,
        preemption: Preemption,
        shares: FairShares | None,
    ) -> None:
        """`shares`: where tenants have fair shares; `queue` is then its."""
        self._limits = limits
        self._running = running
        self._queue = queue
        self._control = control
        self._preemption = preemption
        self._shares = shares
        self._forecast: Forecast | None = None  # for this round, made when first needed
        self._refused_at = NEVER  # versions at which the last admission failed
        self.num_admissions = 0
        self.prompt_tokens = 0  # of requests at their first admission
        self.cached_tokens = 0  # those of them that the prefix cache supplied
        self.state_misses = 0  # those that it had pages of, but no state behind them

    def may_admit(self) -> bool:
        """Whether an admission can succeed: a sequence waits, a row is free, and pages, slots of states or the queue
        have changed since the last attempt failed."""
        if not (self._queue.num_tokens and self._running.rows.num_free):
            return False
        return self._refused_at != self._versions()

    def preempt_for_priority(self) -> None:
        """Preempts background sequences where another one waits for a row or for pages."""
        running, queue = self._running, self._queue
        if not running.rows.num_background or not queue.num_other_tokens or running.releasing:
            return
        self._begin_round()
        head = queue.head()
        if head is not None and not head.is_background and self._preemption.for_priority(head, self._fits):
            self._refused_at = NEVER

    def preempt_for_fair_share(self, shares: FairShares) -> None:
        """Preempts where a tenant below its guaranteed rows waits for a row or for pages."""
        if not self._queue.num_tokens or self._running.releasing:
            return
        shares.note_running(self._running.active())
        if not shares.is_anyone_short():
            return
        self._begin_round()
        head = self._queue.head()
        if head is not None and self._preemption.for_fair_share(head, shares, self._fits):
            self._refused_at = NEVER

    def admit(self, builder: StepPlanBuilder, budget: int, step: int, background: bool | None) -> None:
        """Admits the queue's first sequences while `budget` prompt tokens and rows are left. `background`: True: only
        background requests, False: only others, None: all."""
        running = self._running
        self._begin_round()
        while budget > 0 and running.rows.num_free:
            sequence = self._queue.head()
            if sequence is None or (background is not None and sequence.is_background is not background):
                return
            chunk = self._try_start(builder, sequence, budget, step)
            if chunk is None:
                return
            start, end, spent = chunk
            if end > start:
                running.plan_chunk(sequence, end, step, builder)
            else:
                running.plan_encoding(sequence, step)
            budget -= end - start + spent

    def _versions(self) -> tuple[int, int, int]:
        """Of pages, of slots of states, and of the queue: what was refused may fit once one has changed."""
        kv = self._running.kv
        return kv.version, 0 if kv.states is None else kv.states.version, self._queue.version

    def _begin_round(self) -> None:
        if self._shares is not None:
            self._shares.note_running(self._running.active())
        self._queue.begin_round(self.num_admissions)
        self._forecast = None

    def _try_start(
        self, builder: StepPlanBuilder, sequence: Sequence, budget: int, step: int
    ) -> tuple[int, int, int] | None:
        """Starts the head of the queue. Returns its cached tokens, its first chunk's end and what encoding its images
        takes of the budget; None where it cannot or should not start now."""
        running, tokens, kv = self._running, sequence.token_ids, self._running.kv
        # The last token is always computed, since its hidden state is needed.
        usable = tokens[:-1] if sequence.reads_cache else tokens[:0]
        match = kv.match(sequence.cache_ids(usable), sequence.salt)
        cached = match.num_pages * self._limits.page_size
        end = chunk_end(sequence, cached, budget, builder, self._limits.chunk_multiple)
        images = running.images_ahead(sequence, cached)
        if images is not None:
            end = images.whole_spans(sequence, cached, end)
        if not running.num_active:  # nothing else runs: start if it fits at all
            end = min(end, kv.max_tokens_at_start(match, len(tokens)))
            if images is not None:
                end = images.before_spans(sequence, cached, end)
            new_pages = kv.pages_to_take(match, len(tokens), end)
        else:
            new_pages = kv.pages_to_start(match, len(tokens), end)
        too_short = end <= cached
        if too_short or not self._fits(sequence, new_pages):
            kv.unmatch(match)
            if not too_short:  # else the next step's budget may be enough
                self._refused_at = self._versions()
            return None
        self._queue.remove(sequence)
        if not sequence.resumed and sequence.reports_prompt:  # pages shared with siblings are not counted as cache hits
            self.prompt_tokens += sequence.prompt_len
            self.cached_tokens += cached
            if running.images is not None:
                running.images.note_start(sequence)
            self.state_misses += max(match.known_pages - match.num_pages, 0) * self._limits.page_size
        spent = 0
        if images is not None:
            row = running.rows.next_free
            end, spent = images.reach(sequence, row, cached, end, budget, builder, step)
        running.start(sequence, match, end, self.num_admissions, builder)
        if self._shares is not None:
            self._shares.note_admitted(sequence.tenant, sequence.row, len(tokens) - cached, self.num_admissions)
        self.num_admissions += 1
        return cached, end, spent

    def _fits(self, sequence: Sequence, new_pages: int, promised: int = 0) -> bool:
        """Whether there are pages (and a slot, with states) for the prompt now, and probably pages later for the
        expected growth of all sequences. `promised`: so many others are promised as much."""
        kv = self._running.kv
        available = kv.num_available - promised * new_pages
        if new_pages > available or (kv.states is not None and not kv.states.fit(1 + promised)):
            return False
        if not self._running.num_active:
            return True
        if self._forecast is None:
            self._forecast = self._make_forecast()
        prompt, total = sequence.prompt_len, len(sequence.token_ids)
        most = limit_of(sequence, self._running.max_length) - total
        if self._forecast.admits(most, new_pages, available):
            return True
        remaining = self._control.expected_remaining(
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
        remaining = self._control.expected_remaining(
            state.admission[index], total - prompt, limit - total, state.ends_early[index]
        )
        kv = self._running.kv
        growth = kv.window_growth(index, total + remaining)
        return Forecast(
            remaining, kv.freed_pages(index), self._limits.page_size, kv.groups.num_full, window_growth=growth
        )
