"""Starts an engine core's process, watches and restarts it; one front of a directory does so at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from minisgl_backend.config import EngineConfig
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError, EngineDeadError, MinisglError
from minisgl_backend.ipc.channel import LOCK_NAME
from minisgl_backend.ipc.messages import StartReport
from minisgl_backend.process.backoff import Backoff
from minisgl_backend.process.liveness import PERIOD_S, Liveness, Sign
from minisgl_backend.process.spawn import KILLED, describe_end, start_child

log = logging.getLogger(__name__)

BACKOFF_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0)
STABLE_AFTER_S = 10.0  # a core that served this long resets the back-off; its start, however long, does not count
LOCK_POLL_S = 0.1
STOP_GRACE_S = 3.0
ALL_SIGNS = b"".join(Sign)


class Supervisor:
    """A thread that holds, or waits for, the right to run one core of a socket directory."""

    def __init__(
        self, config: EngineConfig, socket_dir: Path, on_first_failure: Callable[[MinisglError], None], core: int = 0
    ) -> None:
        """`core`: its number, 0 to dp - 1. `on_first_failure` is called on the supervisor's thread with the reason why
        the first core did not become ready; the supervisor has ended then. Once a core was ready, this supervisor's own
        or one reported by `note_ready`, failures are only logged, and retried."""
        self._config = config
        self._socket_dir = socket_dir
        self._on_first_failure = on_first_failure
        self._core = core
        self._name = "the engine core" if config.dp == 1 else f"engine core {core}"
        self._stop_read, self._stop_write = os.pipe()
        self._closed = False
        # The core ends with the thread that started it, so this thread lives as long as the supervisor.
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)
        self._process: CoreProcess | None = None
        self._was_ready = False  # a core of this directory was ready, whoever ran it

    def start(self) -> None:
        self._thread.start()

    @property
    def core_pid(self) -> int | None:
        """Process id of this supervisor's running core."""
        process = self._process
        return process.pid if process is not None else None

    def note_ready(self) -> None:
        """A core serves, perhaps another supervisor's: if this supervisor takes over, it does not give up."""
        self._was_ready = True

    def stop(self) -> None:
        """Begins to end the core, if this supervisor runs it, and the thread."""
        if self._stop_write >= 0:
            os.close(self._stop_write)
            self._stop_write = -1

    def close(self) -> None:
        """`stop`, then waits until both have ended."""
        if self._closed:
            return
        self._closed = True
        self.stop()
        if self._thread.is_alive():
            self._thread.join()
        os.close(self._stop_read)

    def _stopped(self, wait_s: float = 0.0) -> bool:
        return bool(select.select([self._stop_read], [], [], wait_s)[0])

    def _run(self) -> None:
        try:
            lock = os.open(self._socket_dir / f"{LOCK_NAME}{self._core}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._on_first_failure(EngineDeadError(f"{self._name} cannot be started: {error}"))
            return
        try:
            while not self._try_lock(lock):
                if self._stopped(LOCK_POLL_S):
                    return
            self._keep_running()
        finally:
            os.close(lock)

    @staticmethod
    def _try_lock(lock: int) -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process holds it, or the kernel has none to give now
            return False
        return True

    def _keep_running(self) -> None:
        backoff = Backoff(BACKOFF_S, STABLE_AFTER_S)
        while not self._stopped():
            served_s, end = 0.0, "no process"
            try:
                self._process = process = CoreProcess(self._config, self._socket_dir, self._core)
                try:
                    process.wait_ready(self._stop_read)
                    self._was_ready, ready_at = True, time.monotonic()
                    process.wait_dead(self._stop_read)
                    served_s = time.monotonic() - ready_at
                finally:
                    end = process.stop()
                    self._process = None
            except Exception as error:  # any error: without this thread, a core would never be restarted
                if not self._was_ready:
                    self._on_first_failure(_as_told(error))
                    return
                log.error("%s did not start again: %s", self._name, error, exc_info=not isinstance(error, MinisglError))
            if self._stopped():
                return
            delay = backoff.next(served_s)
            log.error("%s ended (%s); it starts again in %.1f s", self._name, end, delay)
            if self._stopped(delay):
                return


def _as_told(error: Exception) -> MinisglError:
    return error if isinstance(error, MinisglError) else EngineDeadError(f"the engine core cannot be started: {error}")


class CoreProcess:
    """One run of the core's process."""

    def __init__(self, config: EngineConfig, socket_dir: Path, core: int) -> None:
        """Starts it. Raises EngineDeadError or OSError if that fails."""
        self._liveness = Liveness(Environment.read().hang_s)
        self._hung = False
        options = dataclasses.asdict(config)
        arguments = ["--socket-dir", str(socket_dir), "--config", msgspec.json.encode(options).decode()]
        self._status_read, status_write = os.pipe()
        arguments += ["--status-fd", str(status_write), "--dp-rank", str(core)]
        try:
            self._popen = start_child("minisgl_backend.engine.process", arguments, fds=(status_write,), tied=True)
        except OSError as error:
            os.close(self._status_read)
            raise EngineDeadError(f"the engine core's process cannot be started: {error}") from error
        finally:
            os.close(status_write)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait_ready(self, stop_fd: int) -> None:
        """Returns when the core is ready, or `stop_fd` becomes readable.

        Raises ConfigError with the core's own message, or EngineDeadError if it failed in another way.
        """
        text = b""
        while b"\n" not in text:
            readable = select.select([self._status_read, stop_fd], [], [], PERIOD_S)[0]
            if stop_fd in readable:
                return
            if self._status_read not in readable:
                if self._liveness.is_silent(time.monotonic()):
                    self._kill_hanging()
                    raise EngineDeadError("the engine core hung while it started; its log says how far it came")
                continue
            piece = os.read(self._status_read, 65536)
            if not piece:
                raise EngineDeadError(f"the engine core ended while it started ({self.stop()}){self._more()}")
            text = (text + piece).lstrip(ALL_SIGNS)
            self._liveness.heard(piece)
        report = msgspec.json.decode(text.partition(b"\n")[0], type=StartReport)
        if report.kind == "ConfigError":
            raise ConfigError(report.message)
        if report.kind == "failed":
            raise EngineDeadError(f"the engine core cannot start: {report.message}")

    def wait_dead(self, stop_fd: int) -> None:
        """Returns when the process has ended, or `stop_fd` becomes readable; kills a process that hangs."""
        while stop_fd not in (readable := select.select([self._status_read, stop_fd], [], [], PERIOD_S)[0]):
            if self._status_read in readable:
                if not (piece := os.read(self._status_read, 65536)):
                    return
                self._liveness.heard(piece)
            elif self._liveness.is_silent(time.monotonic()):
                self._kill_hanging()
                return

    def _kill_hanging(self) -> None:
        log.error("the engine core hangs; it is killed")
        self._hung = True
        self._popen.kill()  # it would not react to SIGTERM

    def stop(self) -> str:
        """Ends the process and returns how it ended. Safe to call twice."""
        if self._popen.stdin is not None and not self._popen.stdin.closed:
            if self._popen.poll() is None:
                self._popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(STOP_GRACE_S)
            if self._popen.poll() is None:
                self._popen.kill()
                self._popen.wait()
            with contextlib.suppress(OSError):
                self._popen.stdin.close()
            os.close(self._status_read)
        return "it hung" if self._hung else describe_end(self._popen.returncode)

    def _more(self) -> str:
        return "" if self._popen.returncode == KILLED else "; its log says why"
