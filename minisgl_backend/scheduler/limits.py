"""All that scheduler and cache know of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backend.kv.groups import FULL, Window
from minisgl_backend.step import Backlog, StepTimes


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Units are tokens, pages and sequences."""

    page_size: int
    num_pages: int  # of the one pool of all cache groups
    max_seq_len: int
    max_running_requests: int
    max_waiting_requests: int
    max_prefill_length: int
    mixed_prefill_length: int
    backlog: Backlog | None = None  # None: steps that also decode always have mixed_prefill_length
    tile_tokens: int = 1  # GEMMs round a step's tokens up to a multiple of this: budgets of two and more fill it
    windows: tuple[Window, ...] = FULL  # of each cache group
    cache_type: str = "radix"
    record_cache_changes: bool = False  # they are taken all the time
    schedule_policy: str = "fcfs"
    background_slowdown: float = 1.0  # how many times as long steps may take for requests below the default priority
    step_times: StepTimes | None = None  # None: not measured
    fair_shares: bool = False  # between tenants
    tenant_weights: tuple[tuple[str, float], ...] = ()  # by name; of all others 1
    max_waiting_requests_per_tenant: int | None = None  # None: half of max_waiting_requests
    eos_token_ids: tuple[int, ...] = ()
    most_drafts: int = 0  # of one row in one step; 0: there is no speculation
    most_draft_entries: int = 0  # of a step with drafts: rows and drafts together
    longest_drafted: int | None = None  # tokens of a sequence up to which a model proposes; None: as long as they get
    sparse_step_sizes: tuple[int, ...] = ()  # ascending: what a step that is as long as the first should be cut to
