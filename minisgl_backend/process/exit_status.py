"""How a process ended, in words."""

from __future__ import annotations

import signal

KILLED = -signal.SIGKILL


def describe_end(status: int) -> str:
    """`status` as `subprocess` has it: below 0 a signal."""
    if status == KILLED:  # nobody here sends it but to processes that hang, which is said when it is done
        return "signal 9: it was killed, most likely for want of memory"
    return f"signal {-status}" if status < 0 else f"exit status {status}"
