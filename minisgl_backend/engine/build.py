"""Builds an engine: options -> model and device facts -> runner (with followers) -> scheduler -> EngineCore.

The build order follows from the data: the runner determines the page count, which the scheduler needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from minisgl_backend.arrays import Int32Array
from minisgl_backend.config import EngineConfig, read_weights
from minisgl_backend.engine.core import EngineCore
from minisgl_backend.engine.followers import Followers, LeaderRunner
from minisgl_backend.engine.open_device import OpenedDevice
from minisgl_backend.engine.progress import StartPhases, start_progress
from minisgl_backend.engine.stages import StepRunner
from minisgl_backend.environment import Environment
from minisgl_backend.grammar.compiling.compilers import GrammarCompilers, Limits
from minisgl_backend.grammar.compiling.tokenizer_info import TokenizerSource
from minisgl_backend.grammar.manager import GrammarManager
from minisgl_backend.ipc.messages import Welcome
from minisgl_backend.models.choose import load_model_config
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.folder import find_model_dir, shown_name
from minisgl_backend.process.liveness import Heartbeat
from minisgl_backend.runner.stand_ins.null import NullRunner
from minisgl_backend.runner.stand_ins.scripted import ScriptedRunner
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.runner.start.step_sizes import PREFILL_LENGTH, TILE_TOKENS
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.speculation.proposer import DeviceProposals, create_proposer
from minisgl_backend.speculative_config import DRAFT_ENTRIES, most_decode_entries
from minisgl_backend.step import StepPlan
from minisgl_backend.text.tokenizer_file import TokenizerFiles

if TYPE_CHECKING:
    import torch

    from minisgl_backend.runner.model_runner import ModelRunner
    from minisgl_backend.tensor_parallel import TensorParallel

log = logging.getLogger(__name__)

EARLY_COMPILER_CORES = 4  # with that many, grammar compilers start while weights are loaded, otherwise afterwards
MAX_QUICK_COMPILERS = 4  # where a quarter of the processors are that many
NULL_PAGE_SIZE = 16
NULL_MAX_PAGES = 1 << 16
NULL_MIXED_PREFILL = 512
NULL_ANSWER = "The null runner says this again and again, and computes nothing. "


@dataclass(frozen=True)
class _Built:
    """A runner with the limits and facts that its build determined."""

    runner: StepRunner
    limits: SchedulerLimits
    description: str
    is_asynchronous: bool  # steps run while the host goes on
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Engine:
    """A core that is ready, with its resources."""

    core: EngineCore
    welcome: Welcome
    model_dir: Path
    model: ModelConfig
    heartbeat: Heartbeat  # `core.step` must be called inside `heartbeat.step`
    _close: Callable[[], None]

    def close(self) -> None:
        """Ends the core, the followers and the heartbeat."""
        try:
            self.core.close()
            self._close()
        finally:
            self.heartbeat.close()


def build_engine(
    config: EngineConfig,
    environment: Environment,
    *,
    dp_rank: int = 0,
    on_hang_or_death: Callable[[str], None] = log.critical,
    heartbeat: Heartbeat | None = None,
    owns_process: bool = False,
) -> Engine:
    """Builds an engine. Raises ConfigError for options or a model that cannot be served.

    `dp_rank`: the number of this engine core, of config.dp. `on_hang_or_death` is called with a reason, on a thread of
    its own, when a step hangs or a tensor-parallel follower has died. `heartbeat`: this process's, if it has one
    already. `owns_process`: nothing else computes in this process, so the engine may set torch's number of threads.
    """
    heartbeat, phases = heartbeat or Heartbeat(environment.hang_s), StartPhases()
    with contextlib.ExitStack() as undo:
        undo.callback(heartbeat.close)
        model_dir = find_model_dir(config.model, trust_remote_code=config.trust_remote_code)
        model = load_model_config(model_dir, config.model_impl, trust_remote_code=config.trust_remote_code)
        compilers = _grammar_compilers(config, model_dir, model, owns_process)
        undo.callback(compilers.close)
        if config.runner == "null":
            built = _null_runner(config, environment, model_dir, model)
            heartbeat.ready(on_cpu=False)
        else:
            has_grammars = importlib.util.find_spec("xgrammar") is not None
            # On a small machine the compilers would take the processors that the loading of weights needs.
            starts_early = has_grammars and len(os.sched_getaffinity(0)) >= EARLY_COMPILER_CORES
            if starts_early:
                compilers.warm_up()
            built = _model_runner(
                config, environment, dp_rank, model_dir, model, on_hang_or_death, heartbeat, owns_process, phases
            )
            if has_grammars and not starts_early:
                compilers.warm_up()
        undo.callback(built.close)
        overlap = built.is_asynchronous if environment.overlap is None else environment.overlap
        grammars = GrammarManager(compilers)
        computes = config.runner != "null"
        proposer = create_proposer(config.speculation)
        if isinstance(proposer, DeviceProposals) and not computes:
            proposer = None
        scheduler = Scheduler(built.limits, proposer=proposer, forced=grammars.forced_tokens)
        health_check = _health_check_plan(config) if computes else None
        core = EngineCore(scheduler, built.runner, overlap=overlap, grammars=grammars, health_check_plan=health_check)
        undo.pop_all()
    phases.ended("scheduler")
    log.debug("the engine started in %s", phases)
    welcome = Welcome(
        pid=os.getpid(),
        max_seq_len=scheduler.max_length,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        page_size=built.limits.page_size,
        num_pages=built.limits.num_pages,
        description=f"{built.description}, {'overlapped' if overlap else 'sequential'} scheduling",
    )
    return Engine(core, welcome, model_dir, model, heartbeat, built.close)


def _grammar_compilers(
    config: EngineConfig, model_dir: Path, model: ModelConfig, owns_process: bool
) -> GrammarCompilers:
    source = TokenizerSource(str(model_dir), config.trust_remote_code, model.vocab_size, list(model.eos_token_ids))
    # An engine core does not use transformers; other threads of a program that embeds an engine may.
    limits = Limits(max_quick=min(MAX_QUICK_COMPILERS, max(1, len(os.sched_getaffinity(0)) // 4)))
    stubbed = ["transformers"] if owns_process else []
    return GrammarCompilers(source, stubbed=stubbed, limits=limits, jump_forward=config.speculation is not None)


def resolve_options(config: EngineConfig, environment: Environment) -> tuple[RuntimeConfig, ModelConfig]:
    """Resolves the options for this machine, without loading anything. Raises ConfigError."""
    from minisgl_backend.runner.start.device import MachineFacts
    from minisgl_backend.runner.start.resolve import resolve

    model_dir = find_model_dir(config.model, trust_remote_code=config.trust_remote_code)
    model = load_model_config(model_dir, config.model_impl, trust_remote_code=config.trust_remote_code)
    return resolve(config, model_dir, model, MachineFacts.detect(), environment), model


def _model_runner(
    config: EngineConfig,
    environment: Environment,
    dp_rank: int,
    model_dir: Path,
    model: ModelConfig,
    on_hang_or_death: Callable[[str], None],
    heartbeat: Heartbeat,
    owns_process: bool,
    phases: StartPhases,
) -> _Built:
    if config.tp == 1:
        runtime, description = _resolve(config, environment, dp_rank, model_dir, model)
        phases.ended("options, torch, device")
        _announce_compiling(runtime, heartbeat)
        runner = _build_runner(runtime, model, phases)
        if owns_process:
            _share_cores(runtime, runner)
        heartbeat.ready(on_cpu=runtime.device == "cpu")
        limits = _limits(runtime, model, runner)
        phases.ended("timed steps")
        return _Built(runner, limits, description, runtime.device != "cpu")
    model.check_tensor_parallel(config.tp)  # before any process is started in vain
    followers = Followers.start(config, environment, model_dir, dp_rank)
    try:
        runtime, description = _resolve(config, environment, dp_rank, model_dir, model)
        tp = followers.connect(runtime, _device(runtime), heartbeat)
        followers.watch(on_hang_or_death, heartbeat)
        phases.ended("options, torch, device, ranks")
        _announce_compiling(runtime, heartbeat)
        runner = _build_runner(runtime, model, phases, tp)
        _share_cores(runtime, runner)
        limits = _limits(runtime, model, runner, tp)
        phases.ended("timed steps")
        followers.note_ready()
        heartbeat.ready(on_cpu=runtime.device == "cpu")
    except BaseException:
        followers.close()
        raise
    leader = LeaderRunner(runner, followers)
    return _Built(leader, limits, description, runtime.device != "cpu", leader.close)


# The two functions below import torch, which takes seconds: the null runner needs none, followers do it meanwhile.


def _resolve(
    config: EngineConfig, environment: Environment, dp_rank: int, model_dir: Path, model: ModelConfig
) -> tuple[RuntimeConfig, str]:
    """The options as resolved for this machine, and a description of the engine."""
    opened = _load_torch(config.first_device(dp_rank))
    from minisgl_backend.runner.start.device import MachineFacts
    from minisgl_backend.runner.start.memory import check_weights_fit
    from minisgl_backend.runner.start.resolve import resolve

    facts = MachineFacts.detect()
    if opened is not None and facts.kind == "cpu":
        opened.close()
    runtime = resolve(config, model_dir, model, facts, environment, dp_rank=dp_rank)
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


def _load_torch(first_device: int) -> OpenedDevice | None:
    """Imports torch with the garbage collector off, and opens the device meanwhile. None: torch had been imported
    already, or the collector was off.

    The import creates 180,000 permanent objects. Collections of them took a sixth of the import time, and as long again
    when the process ended.
    """
    if "torch" in sys.modules or not gc.isenabled():
        return None
    opened = OpenedDevice(first_device)
    gc.collect()  # freezing is permanent: first drop what is not in use
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.enable()
    gc.freeze()
    return opened


def _device(runtime: RuntimeConfig) -> torch.device:
    """Rank 0's device."""
    from minisgl_backend.tensor_parallel import device_of_rank

    return device_of_rank(runtime.device, runtime.device_index(0))


def _announce_compiling(runtime: RuntimeConfig, heartbeat: Heartbeat) -> None:
    from minisgl_backend.runner.start.compiling import announce_compiling

    announce_compiling(runtime.device, heartbeat.compiling, heartbeat.compiled)


def _build_runner(
    runtime: RuntimeConfig, model: ModelConfig, phases: StartPhases, tp: TensorParallel | None = None
) -> ModelRunner:
    from minisgl_backend.runner.start.build import build_runner

    return build_runner(runtime, model, tp, start_progress(phases))


def _share_cores(runtime: RuntimeConfig, runner: ModelRunner) -> None:
    from minisgl_backend.engine.cpu_threads import share_cores

    share_cores(runtime, runner)


def _health_check_plan(config: EngineConfig) -> StepPlan:
    from minisgl_backend.runner.start.memory import health_check_plan

    return health_check_plan(config.max_running_requests)


def _limits(
    runtime: RuntimeConfig, model: ModelConfig, runner: ModelRunner, tp: TensorParallel | None = None
) -> SchedulerLimits:
    from minisgl_backend.runner.start.prefill_budget import measure_prefill_budget

    measured = measure_prefill_budget(runner, runtime, model.vocab_size, tp)
    mixed, backlog = measured.mixed_prefill_length, measured.backlog
    log.info(
        "mixed batches of up to %d prompt tokens%s",
        mixed,
        f", in a backlog {backlog.mixed_prefill_length}" if backlog else "",
    )
    pages, longest, columns = runner.num_pages, runtime.max_prefill_length, runner.columns
    page_size = runtime.page_size * columns.kernel_pages
    limits = _scheduler_limits(runtime.config, model, page_size, pages, runtime.max_seq_len, longest, mixed)
    return dataclasses.replace(
        limits,
        backlog=backlog,
        step_times=measured.step_times,
        sparse_step_sizes=runner.sparse_step_sizes,
        cache_kinds=columns.kinds,
        longest_drafted=None if runtime.draft is None else runtime.draft.max_seq_len,
    )


def _scheduler_limits(
    config: EngineConfig,
    model: ModelConfig,
    page_size: int,
    num_pages: int,
    max_seq_len: int,
    max_prefill_length: int,
    mixed: int,
) -> SchedulerLimits:
    speculation = config.speculation
    return SchedulerLimits(
        page_size=page_size,
        num_pages=num_pages,
        max_seq_len=max_seq_len,
        max_running_requests=config.max_running_requests,
        max_waiting_requests=config.max_waiting_requests,
        max_prefill_length=max_prefill_length,
        mixed_prefill_length=mixed,
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
    )


def _null_runner(config: EngineConfig, environment: Environment, model_dir: Path, model: ModelConfig) -> _Built:
    encode = _encoder(config, model_dir)
    answer = encode(NULL_ANSWER)
    page_size = config.page_size or NULL_PAGE_SIZE
    max_seq_len = model.max_seq_len(config.max_seq_len_override)
    pages = config.num_pages or min(config.max_running_requests * -(-max_seq_len // page_size), NULL_MAX_PAGES)
    log_file = Path(environment.null_runner_log) if environment.null_runner_log else None
    runner: StepRunner
    if environment.null_runner_scripts:
        scripts = _read_scripts(Path(environment.null_runner_scripts), encode, model.eos_token_ids)
        runner = ScriptedRunner(scripts, config.null_runner_rate)
    else:
        runner = NullRunner(np.array(answer, dtype=np.int32), config.null_runner_rate, log_file)
    mixed = NULL_MIXED_PREFILL if config.mixed_prefill_length is None else config.mixed_prefill_length
    longest = config.max_prefill_length or PREFILL_LENGTH
    limits = _scheduler_limits(config, model, page_size, pages, max_seq_len, longest, mixed)
    return _Built(runner, limits, f"null runner with the tokenizer of {config.model}", is_asynchronous=True)


def _read_scripts(path: Path, encode: Callable[[str], list[int]], eos_token_ids: Sequence[int]) -> list[Int32Array]:
    """The entries of a JSON list (texts or token ids) as token ids; each but the last gets an end token."""
    given = json.loads(path.read_text(encoding="utf-8"))
    scripts = [encode(script) if isinstance(script, str) else script for script in given]
    scripts[:-1] = [[*script, eos_token_ids[0]] for script in scripts[:-1]]
    return [np.array(script, dtype=np.int32) for script in scripts]


def _encoder(config: EngineConfig, model_dir: Path) -> Callable[[str], list[int]]:
    """Text -> token ids, without the tokenizer's special tokens; without transformers where possible."""
    files = TokenizerFiles(model_dir)
    if files.suffice(trust_remote_code=config.trust_remote_code):
        backend = files.load()
        return lambda text: list(backend.encode(text, add_special_tokens=False).ids)
    from minisgl_backend.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model_dir, trust_remote_code=config.trust_remote_code)
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])
