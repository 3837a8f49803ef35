"""The start of an engine core that computes. Imports torch, which takes seconds: followers do it meanwhile."""

from __future__ import annotations

import logging

from minisgl_backend.engine.cpu_threads import share_cores
from minisgl_backend.engine.followers import Followers, LeaderAdapters, LeaderRunner
from minisgl_backend.engine.open_device import OpenedDevice
from minisgl_backend.engine.progress import start_progress
from minisgl_backend.engine.start import Built, Start, scheduler_limits
from minisgl_backend.models.folder import shown_name
from minisgl_backend.runner.adapter_host import AdapterHost
from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.runner.start.build import build_runner
from minisgl_backend.runner.start.compiling import announce_compiling
from minisgl_backend.runner.start.device import MachineFacts
from minisgl_backend.runner.start.encoder import encoder_limits
from minisgl_backend.runner.start.memory import check_weights_fit
from minisgl_backend.runner.start.prefill_budget import measure_prefill_budget
from minisgl_backend.runner.start.resolve import resolve
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.runner.start.states import fit_rows
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.tensor_parallel import TensorParallel, device_of_rank

log = logging.getLogger(__name__)


def start_alone(start: Start, opened: OpenedDevice | None) -> Built:
    """The runner of one rank. `opened`: see `resolve_here`."""
    runtime, description = resolve_here(start, opened)
    runtime = fit_rows(runtime, start.model)
    start.phases.ended("options, torch, device")
    runner = _build(start, runtime)
    if start.owns_process:
        share_cores(runtime, runner)
    start.heartbeat.ready(on_cpu=runtime.device == "cpu")
    limits = _limits(start, runtime, runner)
    adapters = None if runner.adapters is None else AdapterHost(runner.adapters, TensorParallel.single())
    return Built(runner, limits, description, runtime.device != "cpu", adapters)


def start_leader(start: Start, opened: OpenedDevice | None, followers: Followers) -> Built:
    """Rank 0's runner, with the other ranks."""
    runtime, description = resolve_here(start, opened)
    tp = followers.connect(runtime, device_of_rank(runtime.device, runtime.device_index(0)), start.heartbeat)
    followers.watch(start.on_loss, start.heartbeat)
    runtime = fit_rows(runtime, start.model, tp)
    start.phases.ended("options, torch, device, ranks")
    runner = _build(start, runtime, tp)
    share_cores(runtime, runner)
    limits = _limits(start, runtime, runner, tp)
    followers.note_ready()
    start.heartbeat.ready(on_cpu=runtime.device == "cpu")
    leader = LeaderRunner(runner, followers)
    adapters = None
    if runner.adapters is not None:
        adapters = LeaderAdapters(AdapterHost(runner.adapters, tp), followers)
    return Built(leader, limits, description, runtime.device != "cpu", adapters, leader.close)


def resolve_here(start: Start, opened: OpenedDevice | None) -> tuple[RuntimeConfig, str]:
    """The options as resolved for this machine, and a description of the engine. `opened`: the device, if it was opened
    while torch was imported; it is closed where another one is used."""
    config, model, facts = start.config, start.model, MachineFacts.detect()
    if opened is not None and facts.kind == "cpu":
        opened.close()
    runtime = resolve(config, start.model_dir, model, facts, start.environment, dp_rank=start.dp_rank)
    if not config.dummy_weights:
        check_weights_fit(runtime, model)
    ranks = f" x {config.tp}" if config.tp > 1 else ""
    ranks += f" over {config.nodes} nodes" if config.nodes > 1 else ""
    by_batch = "" if runtime.decode_by_batch is None else f" ({runtime.decode_by_batch})"
    return runtime, (
        f"{shown_name(config.model)} ({model.architecture}), {runtime.dtype} on {runtime.device}{ranks}, "
        f"attention {runtime.prefill_backend},{runtime.decode_backend}{by_batch}, "
        f"pages of {runtime.page_size} tokens"
    )


def _build(start: Start, runtime: RuntimeConfig, tp: TensorParallel | None = None) -> ModelRunner:
    announce_compiling(runtime.device, start.heartbeat.compiling, start.heartbeat.compiled)
    return build_runner(runtime, start.model, tp, start_progress(start.phases))


def _limits(
    start: Start, runtime: RuntimeConfig, runner: ModelRunner, tp: TensorParallel | None = None
) -> SchedulerLimits:
    measured = measure_prefill_budget(runner, runtime, start.model.vocab_size, tp)
    mixed, backlog = measured.mixed_prefill_length, measured.backlog
    log.info(
        "mixed batches of up to %d prompt tokens%s",
        mixed,
        f", in a backlog {backlog.mixed_prefill_length}" if backlog else "",
    )
    start.phases.ended("timed steps")
    page_size = runtime.page_size * runner.columns.kernel_pages
    return scheduler_limits(
        runtime.config,
        start.model,
        page_size=page_size,
        chunk_multiple=page_size if start.model.ends_with_pages else 1,
        num_pages=runner.num_pages,
        num_state_slots=runner.num_state_slots,
        max_seq_len=runtime.max_seq_len,
        max_prefill_length=runtime.max_prefill_length,
        mixed_prefill_length=mixed,
        backlog=backlog,
        step_times=measured.step_times,
        sparse_step_sizes=runner.sparse_step_sizes,
        encoder=encoder_limits(runtime, start.model),
        adapters=() if runner.adapters is None else runner.adapters.served,
        num_adapter_slots=0 if runner.adapters is None else runner.adapters.num_slots,
        adapters_change=runner.adapters is not None,
        cache_kinds=runner.columns.kinds,
        longest_drafted=None if runtime.draft is None else runtime.draft.max_seq_len,
    )
