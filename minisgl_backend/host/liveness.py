"""Whether a process that should give a sign every second hangs: stopped, deadlocked, or lost in one step.

Reads /proc, so Linux only.
"""

from __future__ import annotations

import os
from pathlib import Path

POLL_S = 1.0
IDLE_HANG_S = 10.0  # silent, and it and all its children use no processor: nothing will end that
BUSY_HANG_S = 300.0  # silent however busy; the first step of a new kernel may compile for minutes
IDLE_SHARE = 0.02  # of one processor


class Liveness:
    """Silence of one process. Only time in which the watcher itself ran counts: a machine that slept proves nothing."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._silence = 0.0
        self._last_look: float | None = None
        self._used = 0.0

    def heard(self) -> None:
        """The process gave a sign."""
        self._silence, self._last_look = 0.0, None

    def hangs(self, now: float) -> bool:
        """Call every POLL_S while nothing is heard; `now` in seconds of any steady clock."""
        if self._last_look is None:
            self._used = processor_seconds(self._pid)
        else:
            self._silence += min(now - self._last_look, 2 * POLL_S)
        self._last_look = now
        if self._silence < IDLE_HANG_S:
            return False
        used = processor_seconds(self._pid) - self._used
        return used < IDLE_SHARE * self._silence or self._silence >= BUSY_HANG_S


def processor_seconds(pid: int) -> float:
    """What a process and its living descendants have used so far; 0 for what is gone."""
    try:
        # The name in parentheses may hold anything; the fields follow the last one.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        children = [text for task in Path(f"/proc/{pid}/task").iterdir() for text in _children(task)]
    except OSError:
        return 0.0
    # User and system time, and those of children that have ended.
    own = sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    return own + sum(processor_seconds(int(child)) for child in children)


def _children(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:
        return []
