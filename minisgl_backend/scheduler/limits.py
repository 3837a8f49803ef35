"""All configuration that scheduler and cache depend on."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backend.adapters.served import ServedAdapter
from minisgl_backend.encoder_limits import EncoderLimits
from minisgl_backend.errors import ConfigError
from minisgl_backend.kv.kinds import FULL, CacheKind
from minisgl_backend.step import Backlog, StepTimes


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Units are tokens, pages and sequences."""

    page_size: int  # of a column of the page table
    num_pages: int  # in the one pool that all cache groups share
    max_seq_len: int
    max_running_requests: int
    max_waiting_requests: int
    max_prefill_length: int
    mixed_prefill_length: int
    # Tokens; a prompt chunk ends with its prompt or at a multiple of it. The page size, where a model keeps what later
    # tokens need with whole pages (`MixerConfig.ends_with_pages`).
    chunk_multiple: int = 1
    backlog: Backlog | None = None  # None: steps that also decode always have mixed_prefill_length
    tile_tokens: int = 1  # GEMMs round a step's tokens up to a multiple of it; larger budgets end on one
    cache_kinds: tuple[CacheKind, ...] = (FULL,)  # of the pages of a column (`kv.groups`)
    num_state_slots: int = 0  # of a model with states, at least 2; 0: a model without
    cache_type: str = "radix"
    record_cache_changes: bool = False  # the caller drains them continually
    schedule_policy: str = "fcfs"
    background_slowdown: float = 1.0  # allowed slowdown of steps by requests below the default priority, as a factor
    step_times: StepTimes | None = None  # None: not measured
    fair_shares: bool = False  # between tenants
    tenant_weights: tuple[tuple[str, float], ...] = ()  # by name; 1 for all others
    max_waiting_requests_per_tenant: int | None = None  # None: half of max_waiting_requests
    eos_token_ids: tuple[int, ...] = ()
    most_drafts: int = 0  # per row and step; 0: no speculation
    most_draft_entries: int = 0  # per step with drafts: rows and drafts together
    longest_drafted: int | None = None  # sequence length up to which a draft model proposes; None: no limit
    encoder: EncoderLimits | None = None  # None: the model takes no images
    adapters: tuple[ServedAdapter, ...] = ()
    num_adapter_slots: int = 0  # of the device
    adapters_change: bool = False  # others may be loaded while it serves
    sparse_step_sizes: tuple[int, ...] = ()  # ascending; steps between the first and the last are cut to one of them

    def __post_init__(self) -> None:
        """Raises ConfigError for an encoder whose images would wait for ever."""
        whole_pages = self.num_state_slots or self.chunk_multiple > 1
        if whole_pages and self.encoder is not None and self.encoder.bidirectional:
            raise ConfigError(
                f"num_state_slots is {self.num_state_slots} and chunk_multiple {self.chunk_multiple} with an encoder "
                "whose images' tokens see each other; allowed: 0 and 1, since a chunk that ends with a page may end "
                "inside of such an image"
            )
