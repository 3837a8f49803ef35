"""Which server of this project listens on a TCP port, by /proc: as far as this user may look."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from minisgl_backend.process.processes import Process, descendants, process_table

_LISTENS = "0A"
_PACKAGE, _WORKER, _SERVER = b"minisgl_backend", b"minisgl_backend.openai.worker", b"tritonserver"


def server_on(port: int, proc: Path = Path("/proc")) -> int | None:
    """The process id of the server that listens there, on any address; None: no server of this project, or one of
    another user."""
    table, inodes = process_table(proc), _inodes(port, proc)
    for pid in sorted(table):
        if inodes and inodes & _sockets(proc / str(pid) / "fd") and _is_server(pid, table, proc):
            return pid
    return None


def _is_server(pid: int, table: dict[int, Process], proc: Path) -> bool:
    """It runs this package's code; or it is a tritonserver whose models do; or it has started such a server or a
    process of the endpoint, under whichever name the command has. That other programs start servers, too, as tests
    do, does not make them one."""
    command = _command(proc / str(pid))
    if _PACKAGE in command:
        return True
    if command.partition(b"\0")[0].endswith(_SERVER):
        return any(_PACKAGE in _command(proc / str(below.pid)) for below in descendants(pid, table))
    children = [process.pid for process in table.values() if process.parent == pid]
    commands = {child: _command(proc / str(child)) for child in children}
    return any(
        _WORKER in command or (command.partition(b"\0")[0].endswith(_SERVER) and _is_server(child, table, proc))
        for child, command in commands.items()
    )


def _inodes(port: int, proc: Path) -> set[str]:
    """The sockets that listen on the port."""
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / name).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{words[9]}]")
    return found


def _sockets(folder: Path) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(entry))
    return found


def _command(folder: Path) -> bytes:
    with contextlib.suppress(OSError):
        return (folder / "cmdline").read_bytes()
    return b""
