"""The callback type for the progress of a long start."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]  # (done so far, total)


def no_progress(done: int, total: int) -> None:
    """Reports nothing."""
