"""Runs the OpenAI-compatible endpoint: worker processes on one listening socket, watched and restarted.

This process owns the socket, so that connections wait while a worker is replaced, instead of being refused.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from minisgl_backend.errors import ConfigError
from minisgl_backend.host.options.endpoint import EndpointSettings, files_error
from minisgl_backend.process.backoff import Backoff
from minisgl_backend.process.spawn import start_child
from minisgl_backend.process.stop_signals import on_stop_signals

SETTINGS_VARIABLE = "MINISGL_OPENAI_SETTINGS"  # not on a command line, where anyone could read the keys

_WORKER = "minisgl_backend.openai.worker"
_BACKLOG = 2048
_LOOK_SECONDS = 0.1
_BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0)
_STABLE_SECONDS = 30.0  # a worker that lived this long restarts without a delay
_DRAIN_SECONDS = 30.0  # for requests in flight, if no server reports their end
_STOP_SECONDS = 3.0  # for workers to end, once no request is left


@dataclass
class _Worker:
    """One of the processes, and the next in its place."""

    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    next_start: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(_BACKOFF_SECONDS, _STABLE_SECONDS))


class OpenAIEndpoint:
    """The endpoint from construction until `stop`. Raises ConfigError if it cannot be served."""

    def __init__(self, settings: EndpointSettings, say: Callable[[str], None] = lambda text: None) -> None:
        """`say` is called with what a person should know: deaths and restarts."""
        settings.check()
        settings.check_packages()
        self._say = say
        if settings.files_folder and settings.max_files_bytes:
            settings = _with_files(settings, say)
        self._socket = _listen(settings.host, settings.port)
        self._folder = _new_folder()
        self._settings = replace(settings, state_folder=settings.state_folder or self._folder.name)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._workers = [_Worker() for _ in range(settings.workers)]
        # Workers die with the thread that started them, so the watching thread starts them all.
        self._thread = threading.Thread(target=self._watch, name="openai-endpoint", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the machine has no thread left
            self._socket.close()
            self._folder.cleanup()
            raise ConfigError(f"the OpenAI endpoint cannot be served: {error}") from None

    @property
    def port(self) -> int:
        """The TCP port in use."""
        return int(self._socket.getsockname()[1])

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the living workers."""
        with self._lock:
            return [process.pid for process in self._living()]

    def begin_stop(self) -> None:
        """Refuses new connections and requests; those in flight continue until the server has answered them."""
        self._stopping.set()
        with self._lock:  # a process may just be starting, with this socket
            self._socket.close()
            self._signal(signal.SIGTERM)

    def stop(self, timeout: float = _STOP_SECONDS) -> None:
        """Waits up to `timeout` seconds for requests in flight, then ends the workers."""
        if not self._stopping.is_set():
            self.begin_stop()
        deadline = time.monotonic() + timeout
        while self.process_ids and time.monotonic() < deadline:
            time.sleep(0.02)
        with self._lock:
            self._signal(signal.SIGKILL)
            for worker in self._workers:
                if worker.process is not None:
                    worker.process.wait()
        self._thread.join()
        self._folder.cleanup()

    def _signal(self, number: int) -> None:
        for process in self._living():
            process.send_signal(number)

    def _living(self) -> list[subprocess.Popen[bytes]]:
        return [one.process for one in self._workers if one.process is not None and one.process.poll() is None]

    def _watch(self) -> None:
        while True:
            with self._lock:
                if self._stopping.is_set():
                    break
                for worker in self._workers:
                    self._look_at(worker)
            self._stopping.wait(_LOOK_SECONDS)
        while self.process_ids:  # they die with this thread
            time.sleep(0.02)

    def _look_at(self, worker: _Worker) -> None:
        now, process = time.monotonic(), worker.process
        if process is not None and process.poll() is not None:
            worker.process, worker.next_start = None, now + worker.backoff.next(now - worker.started_at)
            self._say(f"the OpenAI endpoint's process {process.pid} died; it starts again")
        if worker.process is None and now >= worker.next_start:
            try:
                worker.process, worker.started_at = self._start(), now
            except OSError as error:  # no memory or descriptor; raising would end the others
                worker.next_start = now + _BACKOFF_SECONDS[-1]
                self._say(f"a process of the OpenAI endpoint cannot be started: {error}; it is tried again")

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {SETTINGS_VARIABLE: self._settings.to_json()}
        fd = self._socket.fileno()
        return start_child(_WORKER, [str(fd)], fds=(fd,), tied=True, environment=environment)


def serve_until_signal(settings: EndpointSettings, say: Callable[[str], None]) -> None:
    """Runs the endpoint alone, in the foreground, until SIGINT or SIGTERM. Raises ConfigError."""
    stop = threading.Event()
    endpoint = OpenAIEndpoint(settings, say)
    on_stop_signals(stop.set)
    say(f"OpenAI-compatible: {settings.url}/v1, before the server at {settings.grpc_address}")
    stop.wait()
    say("stopping: requests in flight are finished first")
    endpoint.stop(_DRAIN_SECONDS)


def _with_files(settings: EndpointSettings, say: Callable[[str], None]) -> EndpointSettings:
    """The settings; without files, and with a message, if their folder is not usable."""
    if files_error(settings.files_folder) is None:
        return settings
    folder = Path(settings.files_folder).absolute()
    say(f"no files and no batches: {folder} cannot be written; --files-dir names another folder")
    return replace(settings, files_folder="")


def _new_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="minisgl-openai-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(f"the OpenAI endpoint has no folder for what its processes share: {error}") from None


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        with contextlib.suppress(OSError):
            listener.close()
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"--openai-port is {port}, which cannot be had on {host} ({reason}); choose another port"
        ) from None
    return listener
