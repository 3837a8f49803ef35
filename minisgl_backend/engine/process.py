"""The engine core's own process: `python -m minisgl_backend.engine.process`, started by a front.

Knows nothing of fronts beyond its parent, which it does not outlive.

The parent passes the options as JSON and one end of a pipe; the process says on it when it is ready, or why it
cannot start, and the parent sees the process end when the pipe closes. Logs and progress go to stderr.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from minisgl_backend.config import EngineConfig, Environment
from minisgl_backend.engine.build import build_engine
from minisgl_backend.engine.channel import CoreChannel
from minisgl_backend.engine.messages import StartReport
from minisgl_backend.engine.service import CoreService
from minisgl_backend.errors import ConfigError, EngineDeadError

log = logging.getLogger(__name__)

EXIT_CONFIG = 2
EXIT_DEAD = 3
PR_SET_PDEATHSIG = 1


def main(arguments: list[str] | None = None) -> int:
    """Builds the core and serves until the parent goes, SIGTERM comes or the core gives up; returns the exit status."""
    parser = argparse.ArgumentParser(description="The engine core of a Triton model repository; started by its front.")
    parser.add_argument("--socket-dir", type=Path, required=True)
    parser.add_argument("--config", required=True, help="engine options as JSON")
    parser.add_argument("--status-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    die_with_parent()
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends us in its own time
    try:
        environment = Environment.read()
        set_up_logging(environment.log_level, "engine")
        config = EngineConfig(**msgspec.json.decode(options.config))
        engine = build_engine(config, environment, on_follower_death=_end_at_once)
        service = CoreService(engine.core, channel := CoreChannel(options.socket_dir), engine.welcome)
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
    engine.close()
    channel.close()
    return 0


def set_up_logging(level: str, name: str) -> None:
    """Logs of this package to stderr, one line each, with the process's name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name} %(levelname).1s %(message)s", "%H:%M:%S"))
    package = logging.getLogger("minisgl_backend")
    package.handlers = [handler]
    package.setLevel(level)
    package.propagate = False


def die_with_parent() -> None:
    """Ends this process when its parent ends: by a signal from the kernel, and when standard input closes."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()


def _watch_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def _end_at_once(reason: str) -> None:
    """For failures after which neither the device nor other ranks can be trusted to end in an orderly way."""
    log.critical("the engine core gives up: %s", reason)
    sys.stderr.flush()
    os._exit(EXIT_DEAD)


def _report(status_fd: int, report: StartReport) -> None:
    """The pipe stays open: its end tells the parent that this process has ended."""
    os.write(status_fd, msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
