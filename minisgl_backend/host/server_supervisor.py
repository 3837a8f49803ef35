"""`minisgl serve` and `scripts/serve.sh`: runs tritonserver in the foreground, watches it, and restarts what dies.

A dead stub of an ordinary model: the model is reloaded; the engine and the streams of other requests go on. A dead stub
of a decoupled model: its streams would hang for ever, so the server is restarted, which ends them with an error. A dead
server is restarted with a growing delay.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from minisgl_backend.errors import ConfigError
from minisgl_backend.host.health import HealthServer
from minisgl_backend.host.model_check import check_repository, may_lack_gpu
from minisgl_backend.host.node_supervisor import serve_node
from minisgl_backend.host.openai_endpoint import OpenAIEndpoint
from minisgl_backend.host.options.check import OptionCheck
from minisgl_backend.host.options.server import Arguments, ServerSettings, open_ports_warning, parse_arguments, say
from minisgl_backend.host.repository import (
    INFER_ENGINE,
    INFER_MODEL,
    add_control_model,
    add_infer_models,
    render_repository,
)
from minisgl_backend.host.server_process import ServerProcess
from minisgl_backend.host.triton_server import TritonInstall, find_triton_server, is_plain_path
from minisgl_backend.process.backoff import Backoff
from minisgl_backend.process.installed import check_engine_packages
from minisgl_backend.process.ports import free_port_error
from minisgl_backend.process.spawn import describe_end
from minisgl_backend.process.stop_signals import on_stop_signals
from minisgl_backend.process.writable import check_temporary_folders

_LOOK_SECONDS = 0.05  # between checks of the known processes
_SCAN_SECONDS = 0.5  # between scans for new ones
_CHECK_SECONDS = 30.0  # for the result of a process that imports torch
_RELOAD_TIMEOUT_SECONDS = 120.0
_BACKOFF_SECONDS = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
_STABLE_SECONDS = 60.0  # a server that was ready this long restarts without a delay


class Supervisor:
    """Keeps one server running until told to stop."""

    def __init__(self, arguments: Arguments, settings: ServerSettings, install: TritonInstall) -> None:
        self._arguments = arguments
        self._settings = settings
        self._install = install
        self._server: ServerProcess | None = None
        self._endpoint: OpenAIEndpoint | None = None
        self._busy: str | None = "starting"  # why it is not ready, as far as the supervisor knows
        self._stop = threading.Event()
        self._abandon = threading.Event()
        self._announced = False
        self._crashed = False  # the last server was ended by a signal before it was ready

    def run(self) -> int:
        """Serves until a signal. Returns the exit code: 1 if the server never started successfully."""
        on_stop_signals(self._on_signal)
        port = self._settings.health_port
        health = HealthServer(self._settings.host, port, self._not_ready_reason) if port else None
        try:
            return self._keep_running()
        finally:
            if self._endpoint is not None:
                self._endpoint.stop()
            if health is not None:
                health.close()

    def _keep_running(self) -> int:
        backoff, tried_again = Backoff(_BACKOFF_SECONDS, _STABLE_SECONDS), False
        while True:
            ready_since, problem = self._serve_once()
            if self._stop.is_set():
                return 0
            if not self._announced and problem is None and self._crashed and not tried_again:
                # Its shared memory may have belonged to another server that had not quite ended.
                tried_again = True
                say("the server crashed before it was ready; trying once more")
                continue
            if not self._announced:
                say(f"error: {problem or 'the server could not start: what it said is above'}")
                return 1
            if problem is not None:
                say(f"error: {problem}")
            delay = backoff.next(0.0 if ready_since is None else time.monotonic() - ready_since)
            say(f"restarting the server in {delay:.0f} s" if delay else "restarting the server")
            if self._stop.wait(delay):
                return 0

    def _serve_once(self) -> tuple[float | None, str | None]:
        """Runs one server from its start to its end; see `_wait_until_ready`."""
        # Options that were served once need no check.
        check = None if self._announced else OptionCheck(self._settings.repository)
        try:
            if check is not None and may_lack_gpu(self._settings.repository):
                check.wait(_CHECK_SECONDS)  # it probably refuses the options, but comes later if the server starts, too
                if refusal := check.refusal():
                    return None, refusal
            server = self._server = ServerProcess(self._settings, self._install)
        except ConfigError as error:
            if check is not None:
                check.end()
            return None, str(error)
        ready_since = None
        try:
            ready_since, problem = self._wait_until_ready(server, check)
            if ready_since is not None:
                self._watch(server)
        finally:
            self._crashed = ready_since is None and (server.exit_code or 0) < 0
            self._busy = "stopping" if self._stop.is_set() else "restarting"
            self._end(server, was_ready=ready_since is not None)
        return ready_since, problem or server.refusal

    def _wait_until_ready(self, server: ServerProcess, check: OptionCheck | None) -> tuple[float | None, str | None]:
        """(monotonic time at which it became ready, or None; what is wrong, if known)."""
        limit = self._settings.start_timeout
        deadline = time.monotonic() + (limit or float("inf"))
        try:
            while server.exit_code is None and not self._stop.wait(0.1):
                server.dead_models(confirmed=True)  # so that all its processes are known if the server dies now
                if server.ready():
                    server.dead_models(confirmed=True)
                    server.learn_models()
                    if server.has_model("ensemble"):
                        self._start_endpoint()
                    self._busy = None
                    self._announce(server)
                    return time.monotonic(), None
                if check is not None and (refusal := check.refusal()):
                    return None, refusal
                if time.monotonic() > deadline:
                    return None, f"the server was not ready after {limit} s (--start-timeout)"
            return None, None
        finally:
            if check is not None:
                check.end()

    def _watch(self, server: ServerProcess) -> None:
        """Returns when the server has ended, must be restarted, or should stop."""
        next_scan = 0.0
        while not self._stop.wait(_LOOK_SECONDS):
            code = server.exit_code
            if code is not None:
                say(f"the server died ({describe_end(code)})")
                return
            if not server.dead_models() and time.monotonic() < next_scan:
                continue
            next_scan = time.monotonic() + _SCAN_SECONDS
            for model in sorted(server.dead_models(confirmed=True)):
                say(f"a process of model {model} died")
                if server.is_decoupled(model) or model == INFER_ENGINE or not self._reload(server, model):
                    return

    def _reload(self, server: ServerProcess, model: str) -> bool:
        self._busy = f"reloading {model}"
        results: list[bool] = []
        worker = threading.Thread(
            target=lambda: results.append(server.reload(model, _RELOAD_TIMEOUT_SECONDS)), name="reload", daemon=True
        )
        try:
            worker.start()
        except RuntimeError as error:  # the machine has no thread left
            say(f"reloading {model} failed: {error}")
            return False
        while worker.is_alive() and not self._stop.is_set() and server.exit_code is None:
            worker.join(0.1)
        if results != [True]:
            say(f"reloading {model} failed")
            return False
        server.dead_models(confirmed=True)
        self._busy = None
        say(f"model {model} is back")
        return True

    def _end(self, server: ServerProcess, *, was_ready: bool) -> None:
        if self._stop.is_set() and was_ready:
            self._tell("stopping: requests in flight are finished first; Ctrl-C again ends them")
            if self._endpoint is not None:
                self._endpoint.begin_stop()  # its requests in flight end with the server's
            server.stop(self._abandon)
        else:  # no one waits for answers, and a model that is being loaded would not stop soon by itself
            server.clean_up()
        if self._stop.is_set():
            self._tell("stopped")

    def _start_endpoint(self) -> None:
        """Called once, after the first server is ready: the endpoint outlives servers that are restarted."""
        settings = self._arguments.endpoint
        if settings is not None and self._endpoint is None:
            self._endpoint = OpenAIEndpoint(settings, say)
            self._tell(f"OpenAI-compatible: {settings.url}/v1, and a page to chat: {settings.url}")

    def _announce(self, server: ServerProcess) -> None:
        if self._announced:
            self._tell("ready again")
            return
        self._announced = True
        if server.has_model("ensemble"):
            command = self._arguments.example_command(has_chat_template=server.has_chat_template())
            self._tell(f"ready; try:  {command}")
        else:
            self._tell(f"ready: http://{self._settings.address}")
        warning = open_ports_warning(self._arguments)
        if warning is not None:
            say(f"warning: {warning}")

    def _tell(self, text: str) -> None:
        """Says what is neither warning nor error, unless LOG_LEVEL is above INFO."""
        if not self._settings.quiet:
            say(text)

    def _not_ready_reason(self) -> str | None:
        server, busy = self._server, self._busy
        if busy is not None or server is None:
            return busy or "starting"
        if server.exit_code is not None:
            return "the server died"
        dead = server.dead_models()
        if dead:
            return f"a process of model {', '.join(sorted(dead))} died"
        if server.engine_down():
            return "the engine is down"
        return None if server.ready() else "the server is not ready"

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._abandon.set()
        self._stop.set()


def main(arguments: Sequence[str] | None = None, program: str = "scripts/serve.sh") -> int:
    """The command. Exit codes: 0 stopped by a signal, 1 could not serve, 2 wrong options."""
    try:
        parsed = parse_arguments(sys.argv[1:] if arguments is None else arguments, program)
        check_engine_packages()
        if parsed.server.node_rank:
            return serve_node(parsed)
        install = find_triton_server()
        if parsed.endpoint is not None:
            parsed.endpoint.check_packages()
        _check_ports(parsed)
        check_temporary_folders()
        base = None if is_plain_path(tempfile.gettempdir()) else "/tmp"
        with tempfile.TemporaryDirectory(prefix="minisgl-", dir=base) as folder:  # readable only by this user
            settings = _with_repository(parsed, Path(folder))
            check_repository(settings.repository)
            return Supervisor(parsed, settings, install).run()
    except ConfigError as error:
        say(f"error: {error}")
        return 2


def _with_repository(arguments: Arguments, folder: Path) -> ServerSettings:
    """The settings with the repository to serve: a copy in `folder` if options differ."""
    repository = arguments.server.repository
    if arguments.engine_parameters or arguments.server.infer or arguments.server.admin_key:
        render_repository(repository, folder, arguments.engine_parameters)
        if arguments.server.infer and not (repository / INFER_MODEL).is_dir():
            add_infer_models(folder)
        if arguments.server.admin_key:
            add_control_model(folder)
        return replace(arguments.server, repository=folder)
    if not is_plain_path(repository):  # the Python backend's shell would split it
        link = folder / "model_repository"
        link.symlink_to(repository)
        return replace(arguments.server, repository=link)
    return arguments.server


def _check_ports(arguments: Arguments) -> None:
    problem = free_port_error(arguments.server.host, arguments.ports)
    if problem is not None:
        raise ConfigError(problem)


if __name__ == "__main__":
    sys.exit(main())
