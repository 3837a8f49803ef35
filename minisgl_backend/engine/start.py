"""What the start of an engine core is given, and what it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl_backend.config import EngineConfig, read_weights
from minisgl_backend.engine.progress import StartPhases
from minisgl_backend.engine.stages import Adapters, StepRunner
from minisgl_backend.environment import Environment
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.process.liveness import Heartbeat
from minisgl_backend.runner.start.step_sizes import TILE_TOKENS
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.speculative_config import DRAFT_ENTRIES, most_decode_entries


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start. Its phases end while it goes on."""

    config: EngineConfig
    environment: Environment
    model_dir: Path
    model: ModelConfig
    dp_rank: int  # the number of the engine core
    owns_process: bool  # nothing else computes in this process
    on_loss: Callable[[str], None]  # called with a reason when ranks hang or end
    heartbeat: Heartbeat
    phases: StartPhases


@dataclass(frozen=True)
class Built:
    """A runner with the limits and facts that its build determined."""

    runner: StepRunner
    limits: SchedulerLimits
    description: str
    is_asynchronous: bool  # steps run while the host goes on
    adapters: Adapters | None = None  # where there are slots for some
    close: Callable[[], None] = lambda: None


def scheduler_limits(config: EngineConfig, model: ModelConfig, **measured: Any) -> SchedulerLimits:
    """What options and model say, and what a runner has determined."""
    speculation = config.speculation
    return SchedulerLimits(
        max_running_requests=config.max_running_requests,
        max_waiting_requests=config.max_waiting_requests,
        tile_tokens=TILE_TOKENS,
        cache_type=config.cache_type,
        record_cache_changes=config.kv_events_endpoint is not None,
        schedule_policy=config.schedule_policy,
        background_slowdown=config.background_slowdown,
        fair_shares=config.fair_shares,
        tenant_weights=tuple((read_weights(config.tenant_weights) or {}).items()),
        max_waiting_requests_per_tenant=config.max_waiting_requests_per_tenant,
        eos_token_ids=model.eos_token_ids,
        most_drafts=0 if speculation is None else speculation.most_drafts,
        most_draft_entries=min(DRAFT_ENTRIES, most_decode_entries(config.max_running_requests, speculation)),
        **measured,
    )
