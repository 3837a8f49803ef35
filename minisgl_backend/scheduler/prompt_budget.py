"""How many prompt tokens a step may have (the budget of chunked prefill)."""

from __future__ import annotations

import bisect

from minisgl_backend.scheduler.limits import SchedulerLimits

# In a backlog a step computes this share of the waiting tokens, within the bounds of Backlog: while the time to first
# token (TTFT) is seconds, a longer inter-token latency (ITL) matters little, and few long steps clear the backlog
# sooner than many short ones.
BACKLOG_SHARE = 3


class PromptBudget:
    """The budget of each step, given its decoding rows and the waiting tokens. Steps without a prompt need not ask,
    except during a backlog, which ends when this is asked with an empty queue."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self.in_backlog = False

    def budget(self, num_decoding: int, waiting: int) -> int:
        """Prompt tokens of a step in which `num_decoding` rows decode, with `waiting` tokens in the queue. Budgets of
        two tiles and more are lowered so that the step's GEMMs pad few tokens up to their tile size."""
        if not num_decoding:
            return self._limits.max_prefill_length
        budget, backlog = self._limits.mixed_prefill_length, self._limits.backlog
        if backlog is not None:
            # Once begun, a backlog lasts until the queue is empty, so that the end of a batch does not drag on.
            self.in_backlog = waiting > 0 and (self.in_backlog or waiting > backlog.waiting_tokens)
            if self.in_backlog:
                share = min(waiting // BACKLOG_SHARE, backlog.most_prefill_length)
                budget = max(backlog.mixed_prefill_length, share)
        budget = min(budget, self._limits.max_prefill_length)
        tile = self._limits.tile_tokens
        if budget < 2 * tile:
            return budget
        total, sizes = budget + num_decoding, self._limits.sparse_step_sizes
        if sizes and sizes[0] <= total <= sizes[-1]:
            filled = sizes[bisect.bisect_right(sizes, total) - 1]
            if 2 * (filled - num_decoding) >= budget:
                return filled - num_decoding
        return total // tile * tile - num_decoding
