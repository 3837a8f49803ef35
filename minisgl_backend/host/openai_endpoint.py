"""Runs the OpenAI-compatible endpoint: worker processes on one listening socket, watched and restarted.

This process owns the socket, so that connections wait while a worker is replaced, instead of being refused.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from minisgl_backend.errors import ConfigError
from minisgl_backend.parsers.names import REASONING_PARSERS, TOOL_PARSERS
from minisgl_backend.process.spawn import start_child
from minisgl_backend.process.stop_signals import on_stop_signals
from minisgl_backend.process.writable import is_full, write_error

SETTINGS_VARIABLE = "MINISGL_OPENAI_SETTINGS"  # not on a command line, where anyone could read the keys

FILES, BATCHES = "files", "batches"  # the parts of a folder of files

TENANTS = ("none", "key", "user")

_WORKER = "minisgl_backend.openai.worker"
_PACKAGES = ("fastapi", "uvicorn", "tritonclient")
_BACKLOG = 2048
_LOOK_SECONDS = 0.1
_BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0)
_STABLE_SECONDS = 30.0  # a worker that lived this long restarts without a delay
_DRAIN_SECONDS = 30.0  # for requests in flight, if no server reports their end
_STOP_SECONDS = 3.0  # for workers to end, once no request is left


@dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """The endpoint's settings. Addresses are HOST:PORT."""

    host: str = "127.0.0.1"
    port: int = 9000
    grpc_address: str = "127.0.0.1:8001"
    grpc_secure: bool = False  # use TLS to the server
    metrics_address: str = ""  # of the server's metrics; "": there are none
    workers: int = 1
    served_model_names: tuple[str, ...] = ()  # (): the server's name of its model
    api_keys: tuple[str, ...] = ()  # (): no key is required
    tenants: str = "none"  # which part of a request identifies its tenant; see TENANTS
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    otlp_endpoint: str = ""  # of the OpenTelemetry collector for spans; "": none
    allowed_origins: tuple[str, ...] = ()  # of pages in browsers (CORS); (): only the endpoint's own page
    allowed_hosts: tuple[
        str, ...
    ] = ()  # names in `Host` beside this machine's own; (): any unless host is a loopback one
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    max_body_bytes: int = 16 << 20
    ignore_unknown_fields: bool = False  # instead of refusing unknown fields by name
    response_store_bytes: int = 256 << 20  # for responses that are kept; 0: none
    files_folder: str = ""  # for uploads and batches; "": none
    max_files_bytes: int = 4 << 30  # of all files together; 0: no files
    max_batch_requests: int = 16  # of batches, in flight at a time
    state_folder: str = ""  # shared by the workers; "": a folder that is removed with the endpoint
    max_requests: int = 8192  # of one worker at a time; further ones are answered 429

    def check_packages(self) -> None:
        """Raises ConfigError naming packages that are not installed."""
        missing = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
        if missing:
            raise ConfigError(
                f"the OpenAI-compatible endpoint needs {', '.join(missing)}: pip install 'minisgl-backend[openai]', "
                "or do without it: --openai-port 0"
            )

    def check(self) -> None:
        """Raises ConfigError naming the option that is wrong."""
        if self.workers < 1:
            raise ConfigError(f"--openai-workers is {self.workers}; allowed: 1 or more")
        for option, value, allowed in (
            ("--tenants", self.tenants, TENANTS),
            ("--tool-call-parser", self.tool_call_parser, TOOL_PARSERS),
            ("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS),
        ):
            if value not in allowed:
                raise ConfigError(f"{option} is {value!r}; allowed: {', '.join(allowed)}")
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-endpoint is {self.otlp_endpoint!r}; allowed: a URL, as http://127.0.0.1:4318")
        if self.otlp_endpoint and not _has_opentelemetry():
            raise ConfigError("--otlp-endpoint needs OpenTelemetry's packages: pip install 'minisgl-backend[otel]'")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ConfigError("--ssl-certfile and --ssl-keyfile belong together; one of them is missing")
        for option, value in (("--ssl-certfile", self.ssl_certfile), ("--ssl-keyfile", self.ssl_keyfile)):
            if value and not Path(value).is_file():
                raise ConfigError(f"{option} is {value!r}, which is no file")
        if self.max_body_bytes < 1:
            raise ConfigError(f"--max-body-bytes is {self.max_body_bytes}; allowed: 1 or more")
        for option, number, least in (
            ("--response-store-bytes", self.response_store_bytes, 0),
            ("--max-files-bytes", self.max_files_bytes, 0),
            ("--max-batch-requests", self.max_batch_requests, 1),
        ):
            if number < least:
                raise ConfigError(f"{option} is {number}; allowed: {least} or more")
        for name in self.served_model_names:
            if not name or _is_no_unicode(name):
                raise ConfigError(f"--served-model-name is {name!r}; allowed: Unicode text of at least one character")
        if not all(self.api_keys):
            raise ConfigError("--api-key is empty; allowed: at least one character")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EndpointSettings:
        """Decodes what `to_json` wrote."""
        values = json.loads(text)
        tuples = [field.name for field in fields(cls) if str(field.type).startswith("tuple")]
        return cls(**{**values, **{name: tuple(values[name]) for name in tuples}})

    @property
    def url(self) -> str:
        """The URL from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return f"{'https' if self.ssl_certfile else 'http'}://{host}:{self.port}"


def _has_opentelemetry() -> bool:
    try:
        names = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
        return all(importlib.util.find_spec(name) is not None for name in names)
    except ModuleNotFoundError:  # a parent package is missing
        return False


def api_keys_of(given: Sequence[str] | None, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The keys of the command line, otherwise those in MINISGL_API_KEY (separated by commas)."""
    if given:
        return tuple(given)
    return tuple(key.strip() for key in environment.get("MINISGL_API_KEY", "").split(",") if key.strip())


def files_folder_of(given: str | None, port: int, most_bytes: int) -> str:
    """Where files and batches are kept: in the folder that was given, otherwise the port's own. Raises ConfigError for
    one that was given and cannot be written; a full disk may have space later."""
    if not given:
        return default_files_folder(port)
    error = _files_error(given) if most_bytes else None
    if error is not None:
        raise ConfigError(f"--files-dir is {given!r}, which cannot be written: {error.strerror}")
    return given


def _files_error(folder: str) -> OSError | None:
    """What prevents uploads into `folder`, which the first of them makes."""
    errors = (write_error(Path(folder, part)) for part in (FILES, BATCHES))
    return next((error for error in errors if error is not None and not is_full(error)), None)


def default_files_folder(port: int, environment: Mapping[str, str] = os.environ) -> str:
    """A folder for each port, since each may serve another model. "" for a user without a home directory."""
    state = environment.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        return str(Path(state, "minisgl", f"files-{port}").expanduser())
    except RuntimeError:
        return ""


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
        self._workers: list[subprocess.Popen[bytes] | None] = [None] * settings.workers
        self._started_at = [0.0] * settings.workers
        self._failures = [0] * settings.workers
        self._next_start = [0.0] * settings.workers
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
            return [worker.pid for worker in self._workers if worker is not None and worker.poll() is None]

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
                if worker is not None:
                    worker.wait()
        self._thread.join()
        self._folder.cleanup()

    def _signal(self, number: int) -> None:
        for worker in self._workers:
            if worker is not None and worker.poll() is None:
                worker.send_signal(number)

    def _watch(self) -> None:
        while True:
            with self._lock:
                if self._stopping.is_set():
                    break
                for number in range(len(self._workers)):
                    self._look_at(number)
            self._stopping.wait(_LOOK_SECONDS)
        while self.process_ids:  # they die with this thread
            time.sleep(0.02)

    def _look_at(self, number: int) -> None:
        now, worker = time.monotonic(), self._workers[number]
        if worker is not None and worker.poll() is not None:
            stable = now - self._started_at[number] > _STABLE_SECONDS
            failures = self._failures[number] = 0 if stable else self._failures[number]
            delay = _BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS) - 1)]
            self._failures[number] += 1
            self._next_start[number] = now + delay
            self._workers[number] = None
            self._say(f"the OpenAI endpoint's process {worker.pid} died; it starts again")
        if self._workers[number] is None and now >= self._next_start[number]:
            try:
                self._workers[number] = self._start()
                self._started_at[number] = now
            except OSError as error:  # no memory or descriptor; raising would end the others
                self._next_start[number] = now + _BACKOFF_SECONDS[-1]
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
    if _files_error(settings.files_folder) is None:
        return settings
    folder = Path(settings.files_folder).absolute()
    say(f"no files and no batches: {folder} cannot be written; --files-dir names another folder")
    return replace(settings, files_folder="")


def _new_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="minisgl-openai-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(f"the OpenAI endpoint has no folder for what its processes share: {error}") from None


def _is_no_unicode(text: str) -> bool:
    """True for undecodable bytes of an argument, or any non-ASCII ones if Python's encoding is ASCII."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


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
