"""Progress of a start on stderr: a bar on a terminal, an occasional line in a log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

log = logging.getLogger(__name__)

LINE_EVERY_S = 5.0


class ProgressReport:
    """Called with (done, total) as often as the caller likes; prints only where that is worth it."""

    def __init__(self, title: str, describe: Callable[[int], str] = str) -> None:
        """`describe` formats amounts, for example bytes as MiB."""
        self._title = title
        self._describe = describe
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._next_line = time.monotonic() + LINE_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        amounts = f"{self._describe(done)} of {self._describe(total)}"
        if self._console.is_terminal:
            self._show(done, total, amounts)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY_S
            log.info("%s: %s", self._title, amounts)

    def _show(self, done: int, total: int, amounts: str) -> None:
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amounts]}"))
            self._bar = Progress(*columns, console=self._console)
            self._bar.add_task(self._title, amounts=amounts)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, total=total, amounts=amounts)
        if done >= total:
            self._bar.stop()
            self._bar = None


def mebibytes(count: int) -> str:
    """A number of bytes as text."""
    return f"{count / (1 << 20):.0f} MiB"
