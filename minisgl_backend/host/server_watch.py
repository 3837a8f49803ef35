"""A helper process of the first engine front that cleans up once tritonserver is gone: `... server_watch SERVER_PID`.

A Python stub that passes something to its dying server waits for ever while it holds the interpreter's lock (GIL):
nothing in that process can end it, and an engine core behind it would go on computing. The supervisor ends all these
processes; this module does it for a tritonserver that was started in another way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from minisgl_backend.ipc.channel import remove_stale_directories
from minisgl_backend.process.processes import ServerProcesses, process_of
from minisgl_backend.process.spawn import start_child

_LOOK_SECONDS = 1.0
_SCAN_SECONDS = 5.0  # between scans for new processes
_GRACE_SECONDS = 2.0  # for processes of the server to end in order
_LINGER_SECONDS = 60.0  # after the front's end, which the server's own mostly follows


def start_watch() -> subprocess.Popen[bytes]:
    """For this process's parent, the server. The watch ends soon after the server, or a minute after this process."""
    return start_child(__name__, [str(os.getppid())], fds=(), tied=False)


def watch(server_pid: int, starter_pid: int, linger_s: float = _LINGER_SECONDS) -> None:
    """Returns when the server is gone, all its children have ended and its sockets are removed, or when the starter has
    been gone for `linger_s` seconds."""
    processes, server, next_scan = ServerProcesses(server_pid), process_of(server_pid), 0.0
    deadline: float | None = None
    while server is not None:
        now = process_of(server_pid)
        if now is None or now.dead or now.start_ticks != server.start_ticks:
            time.sleep(_GRACE_SECONDS)
            processes.kill_all()
            remove_stale_directories()
            return
        if deadline is None and os.getppid() != starter_pid:
            deadline = time.monotonic() + linger_s
        if deadline is not None and time.monotonic() > deadline:
            return
        if time.monotonic() >= next_scan:
            next_scan = time.monotonic() + _SCAN_SECONDS
            processes.scan()
        time.sleep(_LOOK_SECONDS)
    remove_stale_directories()  # it had gone before this process looked for the first time


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    watch(int(sys.argv[1]), os.getppid())


if __name__ == "__main__":
    main()
