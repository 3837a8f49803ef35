"""What those who start something long are told."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]  # (done so far, of how many)
