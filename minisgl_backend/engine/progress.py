"""Progress of a start on stderr: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

LINE_EVERY_S = 5.0
BAR_EVERY_S = 0.1
BAR_WIDTH = 30


class ProgressReport:
    """Called with (done, of how many) as often as one likes; says something only where it is worth a look."""

    def __init__(self, title: str, describe: Callable[[int], str] = str) -> None:
        """`describe` writes amounts, for example bytes as MiB."""
        self._title = title
        self._describe = describe
        self._terminal = sys.stderr.isatty()
        self._next = time.monotonic() + (0.0 if self._terminal else LINE_EVERY_S)

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        finished = done >= total
        if now < self._next and not (finished and self._terminal):
            return
        self._next = now + (BAR_EVERY_S if self._terminal else LINE_EVERY_S)
        amounts = f"{self._describe(done)} of {self._describe(total)}"
        if not self._terminal:
            log.info("%s: %s", self._title, amounts)
            return
        filled = BAR_WIDTH * done // max(total, 1)
        bar = "#" * filled + "-" * (BAR_WIDTH - filled)
        print(f"\r{self._title} [{bar}] {amounts}", end="\n" if finished else "", file=sys.stderr, flush=True)


def mebibytes(count: int) -> str:
    """A number of bytes in words."""
    return f"{count / (1 << 20):.0f} MiB"
