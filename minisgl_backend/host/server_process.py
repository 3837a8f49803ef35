"""One running tritonserver: starts, queries and stops it, and reloads its models.

A server that has ended is never restarted: create a new ServerProcess.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import secrets
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from minisgl_backend.environment import ADMIN_KEY
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.drain import ANSWER_SECONDS, LAST_CHUNK_SECONDS
from minisgl_backend.host.options.server import ADMIN_APIS, ServerSettings
from minisgl_backend.host.server_log import LogFilter
from minisgl_backend.host.triton_server import DIE_WITH_PARENT, TritonInstall
from minisgl_backend.ipc.channel import socket_directory
from minisgl_backend.process.processes import ServerProcesses
from minisgl_backend.process.status_files import (
    ask_to_drain,
    fronts_not_drained,
    fronts_without_core,
    has_fronts,
    note_lost,
)

_CONTROL_HEADER = "minisgl-control"
_MAX_BODY, _MAX_BODY_BYTES = "--http-max-input-size", 16 << 20  # Triton 2.59 and later; default 64 MB
_NO_PROCESS = "the server's process cannot be started"
_UNLOAD_SECONDS = 5.0  # after SIGTERM, if all requests were finished before


class ServerProcess:
    """Starts the server at construction. All methods are for one thread, except those without effects, for any.

    Construction raises ConfigError, and leaves no process behind, if the machine has no process, thread or socket space
    left for it.
    """

    def __init__(self, settings: ServerSettings, install: TritonInstall) -> None:
        self._settings = settings
        # Loading and unloading models over the network needs this secret, which only this process knows.
        self._control_key = secrets.token_hex(16)
        self._log = LogFilter(verbose=settings.verbose, quiet=settings.quiet)
        self._decoupled: dict[str, bool] = {}
        self._unloadable_models = 0  # left by reloads: an instance whose stub died never unloads
        self._process, read_end = self._start(server_arguments(settings, install, self._control_key), settings)
        self._processes = ServerProcesses(self._process.pid)
        self._pump = threading.Thread(target=self._pump_log, args=(read_end,), name="server-log", daemon=True)
        try:
            self._pump.start()
        except RuntimeError as error:  # the machine has no thread left
            self._give_up()
            os.close(read_end)
            raise ConfigError(f"{_NO_PROCESS}: {error}") from error
        self._socket_directory = self._make_socket_directory()

    @staticmethod
    def _start(arguments: list[str], settings: ServerSettings) -> tuple[subprocess.Popen[bytes], int]:
        """(the process, the end of its log to read from)"""
        try:
            read_end, write_end = _open_log()
        except OSError as error:
            raise ConfigError(f"{_NO_PROCESS}: {error}") from error
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "minisgl_backend.host.triton_server", DIE_WITH_PARENT, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env=_environment(settings),
                # Ctrl-C signals a terminal's whole process group, but the server drains only if its stubs do not get
                # it.
                start_new_session=True,
            )
        except OSError as error:  # no memory or process left
            os.close(read_end)
            raise ConfigError(f"{_NO_PROCESS}: {error}") from error
        finally:
            os.close(write_end)
        return process, read_end

    def _make_socket_directory(self) -> Path:
        """Its name contains the server's process id. If it cannot be created, the server, which has just started,
        ends."""
        try:
            return socket_directory(self._settings.repository, self._process.pid)
        except (OSError, ConfigError) as error:
            self._give_up()
            self._pump.join(timeout=2.0)
            raise ConfigError(f"the directory of the server's sockets cannot be made: {error}") from error

    def _give_up(self) -> None:
        """Ends a server that has just started."""
        self._process.kill()
        self._process.wait()
        self._processes.kill_all()

    @property
    def pid(self) -> int:
        """Process id of the server itself."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: ended by that signal."""
        return self._process.poll()

    @property
    def refusal(self) -> str | None:
        """Why a model could not be loaded, in its own words; None if none gave a reason."""
        return self._log.refusal

    def ready(self) -> bool:
        """True if the server reports all its models as ready."""
        return self._request("v2/health/ready", timeout=1.0) is not None

    def dead_models(self, *, confirmed: bool = False) -> set[str]:
        """Models with a dead stub. `confirmed`: dead at the previous scan as well; also looks for new stubs."""
        return self._processes.scan() if confirmed else self._processes.dead_now()

    def engine_down(self) -> bool:
        """True while an engine core is dead or not back yet. False for a repository without an engine."""
        return fronts_without_core(self._socket_directory) > 0

    def has_model(self, model: str) -> bool:
        """True if the server has loaded this model."""
        return self._request(f"v2/models/{model}/ready", timeout=1.0) is not None

    def has_chat_template(self) -> bool:
        """True if the served model has one: it can be sent messages."""
        body = {
            "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [""]}],
            "outputs": [{"name": "model_info"}],
        }
        reply = self._request("v2/models/tokenizer/infer", timeout=5.0, post=body)
        return reply is not None and bool(json.loads(json.loads(reply)["outputs"][0]["data"][0])["chat_template"])

    def learn_models(self) -> None:
        """To be called once it is ready: later, while a stub is dead, a slow reply could be taken for none."""
        for entry in json.loads(self._request("v2/repository/index", timeout=5.0, post={}) or "[]"):
            self.is_decoupled(entry["name"])

    def is_decoupled(self, model: str) -> bool:
        """True for a model whose streams hang, instead of failing, when its stub has died, and for an unknown one."""
        if model not in self._decoupled:
            reply = self._request(f"v2/models/{model}/config", timeout=5.0)
            if reply is None:
                return True
            policy = json.loads(reply).get("model_transaction_policy", {})
            self._decoupled[model] = bool(policy.get("decoupled"))
        return self._decoupled[model]

    def reload(self, model: str, timeout: float) -> bool:
        """Replaces all instances of a model, and so the ensembles that use it. False if that failed.

        Requests that wait for the old instances get an error, from the engine's fronts or from the server.
        """
        directory = self._socket_directory
        self._processes.kill_stubs(model)
        self._unloadable_models += 1
        note_lost(directory, model)
        # Loading alone does nothing while the model's files are unchanged.
        unloaded = self._change(model, "unload", timeout)
        note_lost(directory, model)  # again, for requests that came meanwhile
        return unloaded and self._change(model, "load", timeout)

    def _change(self, model: str, verb: str, timeout: float) -> bool:
        return self._request(f"v2/repository/models/{model}/{verb}", timeout=timeout, post={}) is not None

    def stop(self, abandon: threading.Event) -> None:
        """Refuses new requests, finishes those in flight within the exit timeout, ends everything. `abandon`: at
        once."""
        deadline = time.monotonic() + self._settings.exit_timeout + 5
        self._processes.scan()
        if self._drain(abandon):
            # tritonserver 2.51 may still wait for requests that ended in an error and that it has lost count of.
            deadline = time.monotonic() + _UNLOAD_SECONDS
        self._signal(signal.SIGTERM)
        while self.exit_code is None and time.monotonic() < deadline and not abandon.wait(0.1):
            live = self._log.live_models
            if self._unloadable_models and live is not None and live <= self._unloadable_models:
                break
        self.clean_up()

    def _drain(self, abandon: threading.Event) -> bool:
        """Waits until the engine's fronts are idle, since streams stall once an ensemble's server gets SIGTERM.

        False if there is no front, or one cannot be asked or does not answer.
        """
        directory, start = self._socket_directory, time.monotonic()
        given = 0.8 * self._settings.exit_timeout
        try:
            ask_to_drain(directory, start + given)
        except OSError:  # no space on the disk
            return False
        while self.exit_code is None and fronts_not_drained(directory) and not abandon.wait(0.05):
            if self._processes.dead_now() or time.monotonic() > start + given + ANSWER_SECONDS:
                return False
        abandon.wait(LAST_CHUNK_SECONDS)
        return has_fronts(directory)

    def clean_up(self) -> None:
        """Ends all that is left of the server and its children, and removes their shared memory."""
        self._processes.scan()
        if self.exit_code is None:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._processes.kill_all()
        shutil.rmtree(self._socket_directory, ignore_errors=True)
        self._pump.join(timeout=2.0)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _request(self, path: str, *, timeout: float, post: dict[str, Any] | None = None) -> bytes | None:
        """The reply's body, or None if there is none or it is an error."""
        request = urllib.request.Request(
            f"http://{self._settings.address}/{path}",
            data=None if post is None else json.dumps(post).encode(),
            headers={_CONTROL_HEADER: self._control_key},
        )
        # Never through a proxy from the environment: the server is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout) as reply:
                return bytes(reply.read())
        except urllib.error.HTTPError as error:
            error.close()
            return None
        except OSError:
            return None

    def _pump_log(self, read_end: int) -> None:
        with os.fdopen(read_end, "rb", buffering=0) as log:
            while True:
                try:
                    data = log.read(65536)
                except OSError:  # how a terminal reports that its other end is closed
                    data = b""
                if not data:
                    break
                _show(self._log.feed(data))
        _show(self._log.close())


def server_arguments(settings: ServerSettings, install: TritonInstall, control_key: str) -> list[str]:
    """tritonserver's command line. `control_key`: value of the control header that permits administration."""
    body_limit = f"{_MAX_BODY}={_MAX_BODY_BYTES}"
    return [
        f"--model-repository={settings.repository}",
        "--model-control-mode=explicit",
        "--load-model=*",
        # The configs are complete; auto-completion would run every model's imports twice.
        "--disable-auto-complete-config",
        *_restriction("--http-restricted-api", settings, control_key),
        *_restriction("--grpc-restricted-protocol", settings, control_key),
        *([body_limit] if _MAX_BODY in install.options else []),
        f"--http-address={_http_address(settings.host)}",
        f"--grpc-address={f'[{settings.host}]' if ':' in settings.host else settings.host}",
        f"--metrics-address={_http_address(settings.host)}",
        f"--http-port={settings.http_port}",
        f"--grpc-port={settings.grpc_port}",
        f"--metrics-port={settings.metrics_port}",
        f"--exit-timeout-secs={settings.exit_timeout}",
        *settings.arguments,
    ]


def _http_address(host: str) -> str:
    """An IPv6 address in the form that libevhtp expects, which serves tritonserver's HTTP and metrics."""
    return f"ipv6:{host}" if ":" in host else host


def _restriction(option: str, settings: ServerSettings, control_key: str) -> list[str]:
    """Restricts administration to those who know the key, except for interfaces that are open to all, or restricted by
    the user's own arguments: tritonserver refuses a second restriction."""
    own = re.findall(rf"{option}[= ]([\w,-]+)", " ".join(settings.arguments))
    taken = {*settings.allowed_apis, *",".join(own).split(",")}
    names = [name for name in ADMIN_APIS if name not in taken]
    return [f"{option}={','.join(names)}:{_CONTROL_HEADER}={control_key}"] if names else []


def _open_log() -> tuple[int, int]:
    """(read end, write end). A terminal if ours is one, so that models draw their progress bars."""
    if not sys.stderr.isatty():
        return os.pipe()
    read_end, write_end = pty.openpty()
    attributes = termios.tcgetattr(write_end)
    attributes[1] &= ~termios.OPOST  # keep line ends unchanged
    termios.tcsetattr(write_end, termios.TCSANOW, attributes)
    fcntl.ioctl(write_end, termios.TIOCSWINSZ, fcntl.ioctl(sys.stderr.fileno(), termios.TIOCGWINSZ, bytes(8)))
    return read_end, write_end


def _environment(settings: ServerSettings) -> dict[str, str]:
    environment = {**os.environ, ADMIN_KEY: settings.admin_key or ""}  # which command lines would show
    environment["PYTHONUNBUFFERED"] = "1"
    # Requests run in parallel already, and a fork after threads have started makes the library warn.
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    return environment


def _show(data: bytes) -> None:
    if data:
        # If the log is not read (a closed terminal, a full disk), the server must not block on it.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
