"""An engine core's own process: `python -m minisgl_backend.engine.process`, started by a front.

The parent passes the options as JSON and one end of a pipe. On the pipe the process reports that it is ready, or why it
cannot start, and sends a heartbeat every second; the pipe closes when the process ends. Logs and progress go to
stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec

from minisgl_backend.config import EngineConfig
from minisgl_backend.engine.adapters_before import loaded_before
from minisgl_backend.engine.build import build_engine
from minisgl_backend.engine.core_server import CoreServer
from minisgl_backend.engine.idle_cpus import IdleCpus
from minisgl_backend.engine.kv_events import KVEventPublisher
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError, EngineDeadError
from minisgl_backend.ipc.adapter_table import task_root
from minisgl_backend.ipc.channel import CoreChannel
from minisgl_backend.ipc.messages import StartReport
from minisgl_backend.process.liveness import Heartbeat, Sign
from minisgl_backend.process.spawn import TIED, begin_child, log_to_stderr

log = logging.getLogger("minisgl_backend.engine.process")  # __name__ is __main__ here

EXIT_CONFIG = 2
EXIT_DEAD = 3


def main(arguments: list[str] | None = None) -> int:
    """Builds the core and serves until the parent goes, SIGTERM comes or the core gives up; returns the exit status."""
    parser = argparse.ArgumentParser(description="The engine core of a Triton model repository; started by its front.")
    parser.add_argument("--socket-dir", type=Path, required=True)
    parser.add_argument("--config", required=True, help="engine options as JSON")
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--dp-rank", type=int, default=0, help="number of this core among those of the server")
    parser.add_argument(TIED, action="store_true")
    options = parser.parse_args(arguments)
    faulthandler.enable()
    begin_child("engine", "INFO", tied=options.tied)
    try:
        environment = Environment.read()
        config = EngineConfig(**msgspec.json.decode(options.config))
        name = "engine" if config.dp == 1 else f"engine {options.dp_rank}"
        log_to_stderr(name, environment.log_level)
        heartbeat = Heartbeat(environment.hang_s)
        heartbeat.start(lambda sign: _tell(options.status_fd, sign, config.tp))
        config, sources = loaded_before(config, options.socket_dir)
        engine = build_engine(
            config,
            environment,
            dp_rank=options.dp_rank,
            on_hang_or_death=_end_at_once,
            heartbeat=heartbeat,
            owns_process=True,
            sources=sources,
            task_root=task_root(options.socket_dir) if config.max_adapter_tasks else None,
        )
        kv_events = _kv_events(config, engine.welcome.page_size, options.dp_rank)
        channel = CoreChannel(options.socket_dir, options.dp_rank)
        service = CoreServer(
            engine.core,
            channel,
            engine.welcome,
            idle_cpus=IdleCpus(config.idle_cpus),
            heartbeat=heartbeat,
            kv_events=kv_events,
        )
    except ConfigError as error:
        _report(options.status_fd, StartReport(kind="ConfigError", message=str(error)))
        return EXIT_CONFIG
    except Exception as error:
        log.exception("the engine core cannot start")
        _report(options.status_fd, StartReport(kind="failed", message=f"{type(error).__name__}: {error}"))
        return 1
    signal.signal(signal.SIGTERM, lambda *_: service.stop())
    _report(options.status_fd, StartReport(kind="ready"))
    log.info("ready: %s", engine.welcome.description)
    try:
        service.run()
    except EngineDeadError as error:
        _end_at_once(str(error))
    except Exception as error:
        log.exception("the engine loop failed")
        _end_at_once(f"{type(error).__name__}: {error}")
    engine.close()
    channel.close()
    if kv_events is not None:
        kv_events.close()
    return 0


def _kv_events(config: EngineConfig, page_size: int, dp_rank: int) -> KVEventPublisher | None:
    if config.kv_events_endpoint is None:
        return None
    return KVEventPublisher(
        config.kv_events_endpoint,
        replay_endpoint=config.kv_events_replay_endpoint,
        topic=config.kv_events_topic,
        page_size=page_size,
        dp_rank=dp_rank,
    )


def _end_at_once(reason: str) -> None:
    """For failures after which the device or other ranks cannot be trusted to end in order."""
    log.critical("the engine core gives up: %s", reason)
    sys.stderr.flush()
    os._exit(EXIT_DEAD)


def _report(status_fd: int, report: StartReport) -> None:
    """The pipe stays open: its end tells the parent that this process has ended."""
    os.write(status_fd, msgspec.json.encode(report) + b"\n")


def _tell(status_fd: int, sign: Sign, tp: int) -> None:
    with contextlib.suppress(OSError):  # the parent has gone, which ends this process in another way
        os.write(status_fd, sign)
    if sign is Sign.STUCK and tp == 1:  # with more ranks it may rightly wait for one of them
        _end_at_once("a step does not come to an end")


if __name__ == "__main__":
    sys.exit(main())
