"""The sockets between fronts and engine core: zmq over ipc in a directory that only the user may enter.

Knows nothing of what the messages mean, beyond how step records merge.

    core      ROUTER `core` (events out, Hello in)    PULL `commands`
    front     DEALER -> `core`                        PUSH -> `commands`

What the detokenizer tells fronts is in `engine.handled`.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import stat
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from minisgl_backend.engine.messages import Command, Event, Hello, Outputs
from minisgl_backend.errors import ConfigError, EngineDeadError

MAX_SOCKET_PATH = 100  # bytes; the kernel allows 107
CORE_SOCKET = "core"
EVENT_QUEUE = 64  # records that may wait in one front's socket before they merge in the core
COMMAND_QUEUE = 16384

Entries = slice | npt.NDArray[np.intp]  # places in parallel arrays; a slice stands for all
ALL = slice(None)


def socket_directory(model_repository: str | Path, parent_pid: int | None = None) -> Path:
    """The private directory (mode 0700) of one server's sockets, made where it is missing.

    Its name holds the user, the server's process id (`parent_pid`; default: the parent of this process) and a hash
    of the repository's path, so that every model of one server finds the same one and no other server does.
    Directories of servers that no longer run are removed. Raises ConfigError where a safe one cannot be made.
    """
    parent_pid = os.getppid() if parent_pid is None else parent_pid
    base, prefix = _socket_base()
    digest = hashlib.sha256(os.fsencode(Path(model_repository).resolve())).hexdigest()[:10]
    _remove_stale(base, prefix)
    directory = base / f"{prefix}{parent_pid}-{digest}"
    make_private(directory)
    return directory


def live_socket_directories() -> dict[int, Path]:
    """The directories of this user's running servers, by the server's process id."""
    base, prefix = _socket_base()
    _remove_stale(base, prefix)
    found = {directory.name.split("-")[2]: directory for directory in base.glob(f"{prefix}*-*")}
    return {int(pid): directory for pid, directory in found.items() if pid.isdigit()}


def _socket_base() -> tuple[Path, str]:
    """(where socket directories are, how their names begin)"""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not os.access(base, os.W_OK | os.X_OK) or len(os.fsencode(base)) > MAX_SOCKET_PATH - 60:
        base = Path("/tmp")
    return base, f"minisgl-{os.getuid()}-"


def make_private(directory: Path) -> None:
    """Makes the directory with mode 0700. Raises ConfigError where somebody else could enter or own it."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{directory} must be a directory that only the user {getpass.getuser()} may enter; "
            "remove it and start again"
        )


def _remove_stale(base: Path, prefix: str) -> None:
    for directory in base.glob(f"{prefix}*-*"):
        pid = directory.name[len(prefix) :].split("-")[0]
        if not pid.isdigit() or Path(f"/proc/{pid}").exists() or directory.is_symlink():
            continue
        with contextlib.suppress(OSError):
            for entry in directory.iterdir():
                entry.unlink()
            directory.rmdir()


def merge_outputs(records: Sequence[Outputs]) -> Outputs:
    """One record that says what these say, in order."""
    if len(records) == 1:
        return records[0]
    details, entries = {}, 0
    for record in records:
        for index, detail in record.details.items():
            details[entries + index] = detail
        entries += len(record.reasons)
    return Outputs(
        uids=b"".join(record.uids for record in records),
        token_ids=b"".join(record.token_ids for record in records),
        reasons=b"".join(record.reasons for record in records),
        details=details,
    )


def split_by_front(uids: npt.NDArray[np.int64]) -> list[tuple[int, Entries]]:
    """(front, its entries) for each front among `uids`, int64 [n]."""
    if not len(uids):
        return []
    fronts = uids >> 47
    first = int(fronts[0])
    if (fronts == first).all():
        return [(first, ALL)]
    return [(int(front), np.flatnonzero(fronts == front)) for front in np.unique(fronts)]


@dataclass(slots=True)
class _Backlog:
    """What a front has not taken yet, in order."""

    head: bytes = b""  # encoded once, however often it is tried
    events: list[Event] = field(default_factory=list)


def _take_first(events: list[Event]) -> Event:
    """Removes the first event, merged with the Outputs that follow it where it is one."""
    count = 1
    if isinstance(events[0], Outputs):
        while count < len(events) and isinstance(events[count], Outputs):
            count += 1
    taken, events[:count] = events[:count], []
    return merge_outputs(taken) if count > 1 else taken[0]  # type: ignore[arg-type]


class CoreChannel:
    """The core's side. Sends never block: what a slow front has not taken merges into its next record."""

    def __init__(self, socket_dir: Path) -> None:
        self._context = zmq.Context(io_threads=1)
        self._events: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._events.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._events.setsockopt(zmq.SNDHWM, EVENT_QUEUE)
        self._commands: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._commands.setsockopt(zmq.RCVHWM, COMMAND_QUEUE)
        for socket, name in ((self._events, CORE_SOCKET), (self._commands, "commands")):
            socket.setsockopt(zmq.LINGER, 200)
            path = socket_path(socket_dir, name)
            with contextlib.suppress(FileNotFoundError):
                path.unlink()  # of a core that was killed
            socket.bind(f"ipc://{path}")
        self._poller = zmq.Poller()
        self._poller.register(self._events, zmq.POLLIN)
        self._poller.register(self._commands, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self._identities: dict[int, bytes] = {}
        self._backlog: dict[int, _Backlog] = {}
        self._lost: list[int] = []
        self.num_malformed = 0

    def receive(self, timeout_ms: int) -> list[Command]:
        """Commands that have arrived; waits up to `timeout_ms` for the first one (0: not at all, -1: for ever).

        A Hello replaces the front's earlier connection, whose sequences nobody waits for.
        """
        if self._backlog:
            timeout_ms = 1 if timeout_ms < 0 else min(timeout_ms, 1)
        commands: list[Command] = []
        ready = dict(self._poller.poll(timeout_ms))
        if self._events in ready:
            while (frames := _receive(self._events)) is not None:
                self._greet(frames, commands)
        if self._commands in ready:
            while (frames := _receive(self._commands)) is not None:
                self._decode(frames[-1], commands)
        return commands

    def _greet(self, frames: list[bytes], commands: list[Command]) -> None:
        if self._decode(frames[-1], commands) and isinstance(hello := commands[-1], Hello):
            self._identities[hello.front] = frames[0]
            self._backlog.pop(hello.front, None)

    def _decode(self, payload: bytes, commands: list[Command]) -> bool:
        try:
            commands.append(self._decoder.decode(payload))
            return True
        except msgspec.MsgspecError:
            self.num_malformed += 1
            return False

    def send(self, front: int, event: Event) -> None:
        """Sends to one front, in order; what it cannot take now waits, and neighbouring Outputs merge."""
        self._backlog.setdefault(front, _Backlog()).events.append(event)
        self._flush(front)

    def flush(self) -> None:
        """Tries again to send what waits."""
        for front in tuple(self._backlog):
            self._flush(front)

    def _flush(self, front: int) -> None:
        backlog = self._backlog[front]
        try:
            identity = self._identities[front]
            while backlog.head or backlog.events:
                if not backlog.head:
                    backlog.head = self._encoder.encode(_take_first(backlog.events))
                self._events.send_multipart((identity, backlog.head), zmq.DONTWAIT)
                backlog.head = b""
        except zmq.Again:
            return
        except KeyError:
            pass  # it has never said Hello, or is gone
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            del self._identities[front]
            self._lost.append(front)
        del self._backlog[front]

    def take_lost(self) -> list[int]:
        """Fronts whose connection was found broken since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def is_attached(self, front: int) -> bool:
        """True from a front's Hello until its connection is found broken."""
        return front in self._identities

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def close(self) -> None:
        self._events.close()
        self._commands.close()
        self._context.term()


class FrontChannel:
    """One connection of a front to a core. A new core needs a new FrontChannel.

    `send` may be called from any thread; everything else belongs to the receive thread.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket_dir: Path, front: int) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
        self._lock = threading.Lock()
        self._commands: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._commands.setsockopt(zmq.SNDHWM, COMMAND_QUEUE)
        self.events: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.events.setsockopt(zmq.RCVHWM, EVENT_QUEUE)
        self.events.setsockopt(zmq.ROUTING_ID, b"f" + front.to_bytes(2, "big") + os.urandom(8))
        self.monitor = self.events.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for socket, name in ((self._commands, "commands"), (self.events, CORE_SOCKET)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits in the socket for a core that is not there
            socket.setsockopt(zmq.RECONNECT_IVL, 10)
            socket.connect(f"ipc://{socket_path(socket_dir, name)}")

    def greet(self, front: int, timeout_ms: int) -> bool:
        """Says Hello as soon as there is a core to hear it; False where none came in time."""
        if not self.events.poll(timeout_ms, zmq.POLLOUT):
            return False
        try:
            self.events.send(self._encoder.encode(Hello(front=front, pid=os.getpid())), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def send(self, command: Command) -> None:
        """Raises EngineDeadError where the command cannot be handed over."""
        payload = self._encoder.encode(command)
        with self._lock:
            try:
                self._commands.send(payload, zmq.DONTWAIT)
            except zmq.ZMQError as error:
                raise EngineDeadError("the engine core takes no commands at the moment") from error

    def receive(self) -> list[Event]:
        """All events that are here by now, neighbouring Outputs merged."""
        events: list[Event] = []
        run: list[Outputs] = []
        while (frames := _receive(self.events)) is not None:
            event = self._decoder.decode(frames[-1])
            if isinstance(event, Outputs):
                run.append(event)
                continue
            if run:
                events.append(merge_outputs(run))
                run = []
            events.append(event)
        return [*events, merge_outputs(run)] if run else events

    def close(self) -> None:
        with self._lock:
            self._commands.close()
        self.events.disable_monitor()
        self.monitor.close()
        self.events.close()


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.DONTWAIT)
    except zmq.Again:
        return None


def socket_path(socket_dir: Path, name: str) -> Path:
    """Where the socket `name` is. Raises ConfigError where the kernel would not take the path."""
    path = socket_dir / name
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(f"the socket path {path} is longer than {MAX_SOCKET_PATH} bytes; use a shorter directory")
    return path
