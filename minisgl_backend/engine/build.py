"""Builds an engine: options -> model and device facts -> runner (with followers) -> scheduler -> EngineCore.

The build order follows from the data: the runner determines the page count, which the scheduler needs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl_backend.config import EngineConfig
from minisgl_backend.engine.adapters import AdapterLoader, Source
from minisgl_backend.engine.core import EngineCore
from minisgl_backend.engine.followers import Followers
from minisgl_backend.engine.null_start import null_runner
from minisgl_backend.engine.open_device import OpenedDevice
from minisgl_backend.engine.progress import StartPhases
from minisgl_backend.engine.stages import Adapters
from minisgl_backend.engine.start import Built, Start
from minisgl_backend.environment import Environment
from minisgl_backend.grammar.compiling.compilers import GrammarCompilers, Limits
from minisgl_backend.grammar.compiling.tokenizer_info import TokenizerSource
from minisgl_backend.grammar.manager import GrammarManager
from minisgl_backend.ipc.messages import Welcome
from minisgl_backend.models.choose import load_model_config
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.folder import adapter_path, find_model_dir
from minisgl_backend.process.liveness import Heartbeat
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.speculation.proposer import DeviceProposals, create_proposer

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)

EARLY_COMPILER_CORES = 4  # with that many, grammar compilers start while weights are loaded, otherwise afterwards
MAX_QUICK_COMPILERS = 4  # where a quarter of the processors are that many


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
    sources: Mapping[str, Source] | None = None,
    task_root: Path | None = None,
) -> Engine:
    """Builds an engine. Raises ConfigError for options or a model that cannot be served.

    `dp_rank`: the number of this engine core, of config.dp. `on_hang_or_death` is called with a reason, on a thread of
    its own, when a step hangs or a tensor-parallel follower has died. `heartbeat`: this process's, if it has one
    already. `owns_process`: nothing else computes in this process, so the engine may set torch's number of threads.
    `sources`: adapters beside the options', which are read when a request names them; `task_root`: where those are that
    requests bring along.
    """
    heartbeat, phases = heartbeat or Heartbeat(environment.hang_s), StartPhases()
    with contextlib.ExitStack() as undo:
        undo.callback(heartbeat.close)
        model_dir = find_model_dir(config.model, trust_remote_code=config.trust_remote_code)
        model = load_model_config(model_dir, config.model_impl, trust_remote_code=config.trust_remote_code)
        model = model.reading(images=config.encoder_cache_bytes > 0)
        compilers = _grammar_compilers(config, model_dir, model, owns_process)
        undo.callback(compilers.close)
        start = Start(
            config=config,
            environment=environment,
            model_dir=model_dir,
            model=model,
            dp_rank=dp_rank,
            owns_process=owns_process,
            on_loss=on_hang_or_death,
            heartbeat=heartbeat,
            phases=phases,
        )
        if config.runner == "null":
            built = null_runner(start)
            heartbeat.ready(on_cpu=False)
        else:
            has_grammars = importlib.util.find_spec("xgrammar") is not None
            # On a small machine the compilers would take the processors that the loading of weights needs.
            starts_early = has_grammars and len(os.sched_getaffinity(0)) >= EARLY_COMPILER_CORES
            if starts_early:
                compilers.warm_up()
            built = _model_runner(start)
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
        health_check = None
        if computes:
            from minisgl_backend.runner.start.memory import health_check_plan

            health_check = health_check_plan(config.max_running_requests)
        core = EngineCore(
            scheduler,
            built.runner,
            overlap=overlap,
            grammars=grammars,
            adapters=_adapter_loader(config, built.adapters, scheduler, sources or {}, task_root),
            health_check_plan=health_check,
        )
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


def _adapter_loader(
    config: EngineConfig,
    host: Adapters | None,
    scheduler: Scheduler,
    sources: Mapping[str, Source],
    task_root: Path | None,
) -> AdapterLoader | None:
    if host is None:
        return None
    root = None if config.adapter_dir is None else Path(config.adapter_dir)
    book = scheduler.adapters
    folders = {name: adapter_path(folder) for name, folder in config.adapter_folders.items()}
    own = {name: Source(folder, book.find(name).digest) for name, folder in folders.items()}
    return AdapterLoader(host, book, config.most_loaded_adapters, root, task_root, {**sources, **own})


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
    model = model.reading(images=config.encoder_cache_bytes > 0)
    return resolve(config, model_dir, model, MachineFacts.detect(), environment), model


def _model_runner(start: Start) -> Built:
    config = start.config
    if config.tp == 1:
        opened = _load_torch(config.first_device(start.dp_rank))
        from minisgl_backend.engine.model_start import start_alone

        return start_alone(start, opened)
    start.model.check_tensor_parallel(config.tp)  # before any process is started in vain
    followers = Followers.start(config, start.environment, start.model_dir, start.dp_rank)
    try:
        opened = _load_torch(config.first_device(start.dp_rank))
        from minisgl_backend.engine.model_start import start_leader

        return start_leader(start, opened, followers)
    except BaseException:
        followers.close()
        raise


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
