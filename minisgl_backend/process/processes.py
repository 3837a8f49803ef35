"""The processes of a running tritonserver, which of its Python stubs have died, and cleaning up after killed ones.

Reads /proc, so Linux only. psutil would not do: it does not report sessions, and derives start times from the wall
clock, up to a second off and different once the clock is set. Start ticks since boot distinguish one server's processes
and folder from another's, and one file has all that is needed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_STUB_NAME = "triton_python_backend_stub"
_CLOCK_SLACK = 0.1  # seconds; times of files and processes are rounded
_KILL_SECONDS = 10.0  # a killed process holds its resources until it is gone


@dataclass(frozen=True)
class Process:
    """One row of the process table."""

    pid: int
    parent: int
    session: int  # pid of the session's leader; children stay in the session when their parent dies
    state: str  # one letter, as in ps; Z: dead and not yet reaped by its parent
    start_ticks: int  # since boot; distinguishes a process from a later one with the same pid

    @property
    def dead(self) -> bool:
        """True for one that has ended and that its parent has not reaped."""
        return self.state in "ZX"


@dataclass(frozen=True)
class Stub:
    """One instance of a Python model."""

    process: Process
    model: str
    shared_memory: str  # name below /dev/shm
    server_pid: int


def process_table(proc: Path = Path("/proc")) -> dict[int, Process]:
    """All processes by pid."""
    found = (_read(entry) for entry in proc.iterdir() if entry.name.isdecimal())
    return {process.pid: process for process in found if process is not None}


def process_of(pid: int) -> Process | None:
    """One process; None if it does not exist."""
    return _read(Path("/proc") / str(pid))


def descendants(root: int, table: dict[int, Process]) -> list[Process]:
    """Children of `root`, their children and so on."""
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += [process.pid for process in below]
    return found


def environment_folder(server: Process, first_stub: Process) -> Path | None:
    """The empty folder below /tmp that tritonserver's Python backend makes before its first stub starts.

    A killed server leaves it behind. None if it cannot be distinguished from another server's folder.
    """
    earliest, latest = _start_time(server) - _CLOCK_SLACK, _start_time(first_stub) + _CLOCK_SLACK
    made = []
    for folder in Path("/tmp").glob("python_env_*"):
        with contextlib.suppress(OSError):
            found = folder.stat()
            if earliest <= found.st_mtime <= latest and found.st_uid == os.getuid():
                made.append(folder)
    return made[0] if len(made) == 1 else None


class ServerProcesses:
    """Keeps track of all processes that a server started, so that deaths are noticed and none outlives the server.

    A stub that dies stays a zombie: tritonserver 2.51 does not reap it, and its model stays READY. A stub that ends in
    order (its model was unloaded) is reaped and vanishes.
    """

    def __init__(self, server_pid: int) -> None:
        self._server_pid = server_pid
        self._stubs: dict[int, Stub] = {}
        self._others: dict[int, Process] = {}
        self._dead_once: set[int] = set()
        self._retired: set[int] = set()
        self._environment_folder: Path | None = None

    def scan(self) -> set[str]:
        """Looks again. Returns the models with a stub that was dead both now and at the previous scan."""
        table = process_table()
        self._others = {pid: process for pid, process in self._others.items() if _same(process, table.get(pid))}
        dead, had_stubs = set(), bool(self._stubs)
        for process in self._started(table):
            known = self._stubs.get(process.pid)
            if known is None or known.process.start_ticks != process.start_ticks:
                stub = _as_stub(process)
                if stub is None:
                    self._others[process.pid] = process
                    continue
                self._stubs[process.pid] = known = stub
            if process.dead and process.parent == self._server_pid and process.pid not in self._retired:
                dead.add(process.pid)
        if not had_stubs and self._stubs and self._server_pid in table:
            first = min((stub.process for stub in self._stubs.values()), key=lambda process: process.start_ticks)
            self._environment_folder = environment_folder(table[self._server_pid], first)
        confirmed, self._dead_once = dead & self._dead_once, dead
        return {self._stubs[pid].model for pid in confirmed}

    def _started(self, table: dict[int, Process]) -> list[Process]:
        """All processes that the server started. Once it is dead, its newest children have another parent; then the
        session identifies them (a server started by a shell has no session of its own), or the server's pid in a stub's
        arguments."""
        found = {process.pid: process for process in descendants(self._server_pid, table)}
        server = table.get(self._server_pid)
        if server is None or server.dead:
            for process in table.values():
                if process.pid != self._server_pid and process.pid not in found and self._is_left(process):
                    found[process.pid] = process
                    found |= {below.pid: below for below in descendants(process.pid, table)}
        return list(found.values())

    def _is_left(self, process: Process) -> bool:
        if process.session == self._server_pid:
            return True
        stub = _as_stub(process)
        return stub is not None and stub.server_pid == self._server_pid and _shares_pids(process)

    def dead_now(self) -> set[str]:
        """The models of which a known stub is a zombie now. Changes nothing; may be called from any thread."""
        return {
            stub.model
            for pid, stub in list(self._stubs.items())
            if pid not in self._retired and (process := process_of(pid)) is not None and process.dead
        }

    def kill_stubs(self, model: str) -> None:
        """Ends all stubs of a model and forgets their deaths: the model's replacement has new ones."""
        for pid, stub in self._stubs.items():
            if stub.model == model:
                self._retired.add(pid)
                _kill(stub.process)

    def kill_all(self) -> None:
        """Ends all that the dead server left running, except this process; removes its shared memory and folder.

        Returns when all have ended, so that their ports and GPU memory are free.
        """
        self.scan()  # it may have started stubs since the last scan
        found = [*self._others.values(), *(stub.process for stub in self._stubs.values())]
        ending = [process for process in found if process.pid != os.getpid()]
        for process in ending:
            _kill(process)
        deadline = time.monotonic() + _KILL_SECONDS
        while time.monotonic() < deadline and any(_lives(process) for process in ending):
            time.sleep(0.01)
        for stub in self._stubs.values():
            if stub.shared_memory:
                Path("/dev/shm", stub.shared_memory).unlink(missing_ok=True)
        if self._environment_folder is not None:
            with contextlib.suppress(OSError):  # the server removed it, or it holds an environment, which stays
                self._environment_folder.rmdir()


def _start_time(process: Process) -> float:
    """On the clock of time.time()."""
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return time.time() - uptime + process.start_ticks / os.sysconf("SC_CLK_TCK")


def _read(entry: Path) -> Process | None:
    try:
        # The name in parentheses may contain anything, parentheses included; the fields follow the last one.
        fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    if len(fields) < 20:
        return None
    return Process(
        pid=int(entry.name),
        parent=int(fields[1]),
        session=int(fields[3]),
        state=fields[0],
        start_ticks=int(fields[19]),
    )


def _as_stub(process: Process) -> Stub | None:
    try:
        arguments = Path(f"/proc/{process.pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return None
    if len(arguments) < 3 or Path(arguments[0]).name != _STUB_NAME:
        return None
    # STUB REPOSITORY/MODEL/VERSION/model.py SHARED_MEMORY_NAME SIZE GROWTH SERVER_PID ...
    name = arguments[2].lstrip("/")
    server_pid = int(arguments[5]) if len(arguments) > 5 and arguments[5].isdecimal() else 0
    return Stub(process, Path(arguments[1]).parent.parent.name, name if "/" not in name else "", server_pid)


def _shares_pids(process: Process) -> bool:
    """Whether it has the same pid namespace: a server in another container may have the pid of this one."""
    try:
        return os.readlink(f"/proc/{process.pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def _same(process: Process, current: Process | None) -> bool:
    return current is not None and current.start_ticks == process.start_ticks


def _lives(process: Process) -> bool:
    current = process_of(process.pid)
    return current is not None and _same(process, current) and not current.dead


def _kill(process: Process) -> None:
    if _same(process, process_of(process.pid)):
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)
