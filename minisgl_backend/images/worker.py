"""A process that decodes images, and holds nothing else: no keys, no sockets but one, no GPU, no model.

Started by images/pool.py as `python -I`, with an empty environment. Limits on memory, time and files come before Pillow
is imported. It ends with its connection, so also when the front is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import signal
import sys
from multiprocessing.connection import Connection

MEMORY_BYTES = 3 << 29  # 1.5 GiB of addresses
SECONDS = 10  # of a task, on a processor
_FILES = 32
_PR_SET_NO_NEW_PRIVS = 38


def main(descriptor: int) -> None:
    """Answers tasks until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit()
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


def _limit() -> None:
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_NOFILE, _FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        _lower(kind, most)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _limit_seconds() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + SECONDS + 1, hard=False)


def _lower(kind: int, most: int, *, hard: bool = True) -> None:
    _, allowed = resource.getrlimit(kind)
    most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    with contextlib.suppress(ValueError, OSError):  # macOS knows no RLIMIT_AS
        resource.setrlimit(kind, (most, most if hard else allowed))
