"""Progress of a start on stderr (a bar on a terminal, an occasional line in a log), and its seconds by phase."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger(__name__)

LINE_EVERY_S = 5.0


class ProgressReport:
    """Called with (done, total) as often as the caller likes; prints only where that is worth it."""

    def __init__(self, title: str, describe: Callable[[int], str] = str) -> None:
        """`describe` formats amounts, for example bytes as MiB."""
        self._title = title
        self._describe = describe
        self._is_terminal = sys.stderr.isatty()
        self._bar: Progress | None = None
        self._next_line = time.monotonic() + LINE_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        amounts = f"{self._describe(done)} of {self._describe(total)}"
        if self._is_terminal:
            self._show(done, total, amounts)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY_S
            log.info("%s: %s", self._title, amounts)

    def _show(self, done: int, total: int, amounts: str) -> None:
        if self._bar is None:
            # Imported late: a server's log has no bars, and its engine starts sooner.
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amounts]}"))
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.add_task(self._title, amounts=amounts)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, total=total, amounts=amounts)
        if done >= total:
            self._bar.stop()
            self._bar = None


def mebibytes(count: int) -> str:
    """A number of bytes as text."""
    return f"{count / (1 << 20):.0f} MiB"


class StartPhases:
    """How long each phase of a start took, from when this is made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._started = clock, clock()
        self._last = self._started
        self._seconds: dict[str, float] = {}  # by phase, in the order in which they ended

    def ended(self, phase: str) -> None:
        """It began where the phase before it ended."""
        now = self._clock()
        self._seconds[phase], self._last = now - self._last, now

    def __str__(self) -> str:
        parts = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self._seconds.items())
        return f"{self._last - self._started:.2f} s: {parts}"


def start_progress(phases: StartPhases) -> Any:
    """Progress reports of a rank's start."""
    from minisgl_backend.runner.start.parts import StartProgress  # imports torch

    return StartProgress(
        weights=ProgressReport("loading weights", mebibytes),
        graphs=ProgressReport("capturing graphs"),
        phase_ended=phases.ended,
    )
