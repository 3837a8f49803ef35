"""How a process ended, as text."""

from __future__ import annotations

import signal

KILLED = -signal.SIGKILL


def describe_end(status: int) -> str:
    """`status` as `subprocess` reports it: a negative one is a signal."""
    if status == KILLED:  # this project kills only processes that hang, and logs it then
        return "signal 9: it was killed, most likely for want of memory"
    return f"signal {-status}" if status < 0 else f"exit status {status}"
