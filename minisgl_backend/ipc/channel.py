"""The sockets between fronts and engine core, in a directory that only the user may enter.

    core i    listens at `events-i` (events out, Hello in; ipc.frames)     zmq PULL `commands-i`
    front     connects to `events-i`                                       zmq PUSH -> `commands-i`

The detokenizer's acknowledgements to fronts are in `ipc.acks`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import zmq

from minisgl_backend.arrays import IndexArray, Int64Array
from minisgl_backend.errors import ConfigError, EngineDeadError
from minisgl_backend.ipc.frames import FrameSocket
from minisgl_backend.ipc.messages import Command, Event, Hello, Outputs
from minisgl_backend.ipc.private import make_private
from minisgl_backend.process.processes import process_of

log = logging.getLogger(__name__)

MAX_SOCKET_PATH = 100  # bytes; the kernel allows 107
EVENTS, COMMANDS = "events", "commands"
LOCK_NAME = "lock-"  # followed by the core's number; the process that runs the core holds the lock
COMMAND_QUEUE = 16384
MAX_UNGREETED = 64  # connections that wait for the core to accept them
ACCEPT_AGAIN_S = 0.1  # after a connection could not be accepted, mostly for lack of file descriptors

Entries = slice | IndexArray  # indices into parallel arrays; a slice means all
ALL = slice(None)


def socket_directory(model_repository: str | Path, parent_pid: int | None = None) -> Path:
    """The private directory (mode 0700) of one server's sockets, created if missing.

    Its name contains the user, the server's process id (`parent_pid`; default: the parent of this process), that
    process's start time and a hash of the repository's path. So all models of a server find the same directory and no
    other server does, not even one with the same process id, as in a restarted container. Directories of servers that
    no longer run are removed. Raises ConfigError if a safe directory cannot be created.
    """
    parent_pid = os.getppid() if parent_pid is None else parent_pid
    base, prefix = _socket_base()
    digest = hashlib.sha256(os.fsencode(Path(model_repository).resolve())).hexdigest()[:10]
    _remove_stale(base, prefix)
    directory = base / f"{prefix}{parent_pid}-{_start_ticks(parent_pid) or 0}-{digest}"
    make_private(directory)
    return directory


def live_socket_directories() -> dict[int, Path]:
    """The directories of this user's running servers, by the server's process id."""
    base, prefix = _socket_base()
    _remove_stale(base, prefix)
    found = {directory.name.split("-")[2]: directory for directory in base.glob(f"{prefix}*-*")}
    return {int(pid): directory for pid, directory in found.items() if pid.isdigit()}


def remove_stale_directories() -> None:
    """Removes the socket directories of this user's servers that no longer run."""
    _remove_stale(*_socket_base())


def _socket_base() -> tuple[Path, str]:
    """(folder of the socket directories, prefix of their names)"""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not os.access(base, os.W_OK | os.X_OK) or len(os.fsencode(base)) > MAX_SOCKET_PATH - 60:
        base = Path("/tmp")
    return base, f"minisgl-{os.getuid()}-"


def _remove_stale(base: Path, prefix: str) -> None:
    for directory in base.glob(f"{prefix}*-*"):
        pid, *rest = directory.name[len(prefix) :].split("-")
        if not pid.isdigit() or directory.is_symlink():
            continue
        began = _start_ticks(int(pid))
        if began is not None and (len(rest) != 2 or rest[0] == str(began)):
            continue
        with contextlib.suppress(OSError):
            entries = list(directory.iterdir())
            if any(_is_locked(entry) for entry in entries if entry.name.startswith(LOCK_NAME)):
                continue  # in use: containers that share this folder have their own process ids
            shutil.rmtree(directory)


def _is_locked(path: Path) -> bool:
    lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _start_ticks(pid: int) -> int | None:
    """When the process started, in ticks since boot; None if there is no such process."""
    process = process_of(pid)
    return None if process is None else process.start_ticks


def merge_outputs(records: Sequence[Outputs]) -> Outputs:
    """Merges records of one front, in order, into one."""
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


def split_by_front(uids: Int64Array) -> list[tuple[int, Entries]]:
    """(front, its entries) for each front among `uids`, int64 [n]."""
    if not len(uids):
        return []
    fronts = uids >> 47
    first = int(fronts[0])
    if (fronts == first).all():
        return [(first, ALL)]
    return [(int(front), np.flatnonzero(fronts == front)) for front in np.unique(fronts)]


def _take_first(events: list[Event]) -> Event:
    """Removes the first event; if it is an Outputs, merged with the Outputs that follow it."""
    count = 1
    if isinstance(events[0], Outputs):
        while count < len(events) and isinstance(events[count], Outputs):
            count += 1
    taken, events[:count] = events[:count], []
    return merge_outputs(taken) if count > 1 else taken[0]  # type: ignore[arg-type]


class CoreChannel:
    """The core's end. Sends never block: what a slow front has not taken merges into its next record."""

    def __init__(self, socket_dir: Path, core: int = 0) -> None:
        """`core`: its number among those of the server."""
        self._context = zmq.Context(io_threads=1)
        self._commands: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._commands.setsockopt(zmq.RCVHWM, COMMAND_QUEUE)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        # First: a front connects to it as soon as it reaches the command socket.
        self._listener.bind(str(_unbound(socket_path(socket_dir, f"{EVENTS}-{core}"))))
        self._listener.listen(MAX_UNGREETED)
        self._commands.bind(f"ipc://{_unbound(socket_path(socket_dir, f'{COMMANDS}-{core}'))}")
        self._poller = zmq.Poller()
        for source in (self._commands, self._listener.fileno()):
            self._poller.register(source, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self._connections: dict[int, FrameSocket] = {}  # by file descriptor
        self._fronts: dict[int, FrameSocket] = {}  # by front; those that said Hello
        self._backlog: dict[int, list[Event]] = {}  # events that a front has not taken yet, in order
        self._lost: list[int] = []
        self._accept_at: float | None = None  # time.monotonic() until which the listener is ignored; None: not ignored
        self._accept_fails = False  # logged once
        self.num_malformed = 0

    def receive(self, timeout_ms: int) -> list[Command]:
        """Commands that have arrived; waits up to `timeout_ms` for the first one (0: not at all, -1: for ever).

        A Hello replaces the front's earlier connection, whose sequences no client waits for.
        """
        if self._backlog:
            timeout_ms = 1 if timeout_ms < 0 else min(timeout_ms, 1)
        if self._accept_at is not None:
            timeout_ms = self._until_accept(self._accept_at, timeout_ms)
        commands: list[Command] = []
        for source, _ in self._poller.poll(timeout_ms):
            if source is self._commands:
                self._receive_commands(commands)
            elif source in self._connections:
                self._hear(self._connections[source], commands)
            else:
                self._accept()
        return commands

    def _receive_commands(self, commands: list[Command]) -> None:
        while True:
            try:
                payload = self._commands.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._decode(payload, commands)

    def _accept(self) -> None:
        try:
            connection = FrameSocket(self._listener.accept()[0])
        except BlockingIOError:  # it left before it was accepted
            return
        except OSError as error:
            # The connection stays pending and the listener readable: without a pause, no turn would ever wait for a
            # command.
            self._poller.unregister(self._listener.fileno())
            self._accept_at = time.monotonic() + ACCEPT_AGAIN_S
            if not self._accept_fails:
                log.warning("a front's connection cannot be taken: %s; it is tried again until it can", error)
            self._accept_fails = True
            return
        self._accept_fails = False
        self._connections[connection.fileno()] = connection
        self._poller.register(connection.fileno(), zmq.POLLIN)

    def _until_accept(self, accept_at: float, timeout_ms: int) -> int:
        """`timeout_ms`, shortened to the rest of the pause; once the pause is over, watches the listener again."""
        left_ms = int(1000 * (accept_at - time.monotonic())) + 1
        if left_ms > 0:
            return left_ms if timeout_ms < 0 else min(timeout_ms, left_ms)
        self._poller.register(self._listener.fileno(), zmq.POLLIN)
        self._accept_at = None
        return timeout_ms

    def _hear(self, connection: FrameSocket, commands: list[Command]) -> None:
        for payload in connection.receive():
            if self._decode(payload, commands) and isinstance(hello := commands[-1], Hello):
                self._attach(hello.front, connection)
        if connection.ended:
            self._drop(connection)

    def _attach(self, front: int, connection: FrameSocket) -> None:
        earlier = self._fronts.pop(front, connection)
        if earlier is not connection:
            self._drop(earlier)
        self._fronts[front] = connection
        self._backlog.pop(front, None)
        if front in self._lost:
            self._lost.remove(front)

    def _drop(self, connection: FrameSocket) -> None:
        del self._connections[connection.fileno()]
        self._poller.unregister(connection.fileno())
        connection.close()
        for front in [front for front, one in self._fronts.items() if one is connection]:
            del self._fronts[front]
            self._backlog.pop(front, None)
            self._lost.append(front)

    def _decode(self, payload: bytes, commands: list[Command]) -> bool:
        try:
            commands.append(self._decoder.decode(payload))
            return True
        except msgspec.MsgspecError:
            self.num_malformed += 1
            return False

    def send(self, front: int, event: Event) -> None:
        """Sends to one front, in order; what it cannot take now waits, and consecutive Outputs merge.

        Events for a front that is not attached are dropped.
        """
        if front in self._fronts:
            self._backlog.setdefault(front, []).append(event)
            self._flush(front)

    def flush(self) -> None:
        """Tries again to send the waiting events."""
        for front in tuple(self._backlog):
            self._flush(front)

    def _flush(self, front: int) -> None:
        connection, events = self._fronts[front], self._backlog[front]
        try:
            while connection.flush():
                if not events:
                    del self._backlog[front]
                    return
                connection.send(self._encoder.encode(_take_first(events)))
        except OSError:
            self._drop(connection)

    def take_lost(self) -> list[int]:
        """Fronts whose connection was found broken since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def is_attached(self, front: int) -> bool:
        """True from a front's Hello until its connection is found broken."""
        return front in self._fronts

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._listener.close()
        self._commands.close(linger=0)
        self._context.term()


class FrontChannel:
    """One connection of a front to a core. A new core needs a new FrontChannel.

    `send` may be called from any thread; everything else belongs to the receive thread.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket_dir: Path, core: int = 0) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
        self._lock = threading.Lock()
        self._events_path = str(socket_path(socket_dir, f"{EVENTS}-{core}"))
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._events = FrameSocket(self._connection)
        self._commands: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._commands.setsockopt(zmq.SNDHWM, COMMAND_QUEUE)
        self._commands.setsockopt(zmq.LINGER, 0)
        self._commands.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued in the socket for a core that is not there
        self._commands.setsockopt(zmq.RECONNECT_IVL, 10)
        self._commands.connect(f"ipc://{socket_path(socket_dir, f'{COMMANDS}-{core}')}")

    def greet(self, front: int, timeout_ms: int) -> bool:
        """Says Hello as soon as a core listens; False if none did in time."""
        if not self._commands.poll(timeout_ms, zmq.POLLOUT):
            return False
        try:
            self._connection.connect(self._events_path)
        except OSError:  # it is about to end
            return False
        with contextlib.suppress(OSError):  # it has just ended, as `receive` will report
            self._events.send(self._encoder.encode(Hello(front=front, pid=os.getpid())))
        return True

    def send(self, command: Command) -> None:
        """Raises EngineDeadError if the command cannot be sent."""
        payload = self._encoder.encode(command)
        with self._lock:
            try:
                self._commands.send(payload, zmq.DONTWAIT)
            except zmq.ZMQError as error:
                raise EngineDeadError("the engine core takes no commands at the moment") from error

    def fileno(self) -> int:
        """For a poller: readable when there is something to receive. Only after `greet`."""
        return self._events.fileno()

    def receive(self) -> list[Event]:
        """All events that have arrived, consecutive Outputs merged."""
        events: list[Event] = [self._decoder.decode(payload) for payload in self._events.receive()]
        merged: list[Event] = []
        while events:
            merged.append(_take_first(events))
        return merged

    @property
    def ended(self) -> bool:
        """The core is gone, and all that it had sent was received."""
        return self._events.ended

    def close(self) -> None:
        with self._lock:
            self._commands.close()
        self._events.close()


def _unbound(path: Path) -> Path:
    """The path, after removing what a killed core has left there."""
    path.unlink(missing_ok=True)
    return path


def socket_path(socket_dir: Path, name: str) -> Path:
    """The path of the socket `name`. Raises ConfigError if it is too long for the kernel."""
    path = socket_dir / name
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(f"the socket path {path} is longer than {MAX_SOCKET_PATH} bytes; use a shorter directory")
    return path
