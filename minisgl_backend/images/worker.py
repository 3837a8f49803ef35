"""A process that decodes images, and holds nothing else: no keys, no sockets but one, no GPU, no model.

Started by images/pool.py as `python -I`. Limits on memory, time and files come before Pillow is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection

MEMORY_BYTES = 3 << 29  # 1.5 GiB of addresses
SECONDS = 10  # of a task, on a processor
_FILES = 32
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


def main(descriptor: int, *, tied: bool) -> None:
    """Answers tasks until the connection is closed. `tied`: the starting thread lives as long as its process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit(tied=tied)
    import msgspec

    from minisgl_backend.images.tasks import Decode, Open
    from minisgl_backend.images.work import Work

    connection, work = Connection(descriptor), Work()
    decoder = msgspec.json.Decoder(Open | Decode)
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError, OSError):
        while True:
            task = decoder.decode(connection.recv_bytes())
            data = connection.recv_bytes() if isinstance(task, Open) else b""
            _limit_seconds()
            connection.send_bytes(msgspec.json.encode(work.answer(task, data)))


def _limit(*, tied: bool) -> None:
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_NOFILE, _FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        _lower(kind, most)
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if tied:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _limit_seconds() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + SECONDS + 1, hard=False)


def _lower(kind: int, most: int, *, hard: bool = True) -> None:
    _, allowed = resource.getrlimit(kind)
    most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    with contextlib.suppress(ValueError, OSError):  # macOS knows no RLIMIT_AS
        resource.setrlimit(kind, (most, most if hard else allowed))


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    main(int(sys.argv[1]), tied="--tied" in sys.argv)
