"""One line in the log now and then: what the engine does."""

from __future__ import annotations

import logging

from minisgl_backend.step import StepStats

log = logging.getLogger(__name__)


class StatusLine:
    """Logs a line every `period_s` while there is work, and one when the work has ended."""

    def __init__(self, now: float, period_s: float = 10.0) -> None:
        self._period_s = period_s
        self._due = now + period_s
        self._since = now
        self._last: StepStats | None = None  # at the last line

    def is_due(self, now: float) -> bool:
        """True when `update` would look at the counters."""
        return now >= self._due

    def update(self, stats: StepStats, now: float) -> str | None:
        """Logs and returns the line; None where nothing has happened since the last one."""
        self._due = now + self._period_s
        last, since, self._since = self._last, self._since, now
        if last is not None and stats.step == last.step and not stats.num_running:
            return None
        self._last = stats
        line = _describe(stats, last, max(now - since, 1e-3))
        log.info("%s", line)
        return line


def _describe(stats: StepStats, last: StepStats | None, seconds: float) -> str:
    generated = stats.total_generated_tokens - (last.total_generated_tokens if last else 0)
    prompt = stats.total_prompt_tokens - (last.total_prompt_tokens if last else 0)
    cached = stats.total_cached_tokens - (last.total_cached_tokens if last else 0)
    free = stats.pages_free + stats.pages_cached
    return (
        f"running {stats.num_running}, waiting {stats.num_waiting}, "
        f"generated {generated / seconds:.0f} tok/s, prompts {(prompt - cached) / seconds:.0f} tok/s, "
        f"cache hits {100 * cached / max(prompt, 1):.0f}%, "
        f"free pages {free} of {stats.pages_total} ({stats.pages_cached} cached), "
        f"finished {stats.total_finished}, cancelled {stats.total_cancelled}, failed {stats.total_failed}, "
        f"preempted {stats.total_preempted}"
    )
