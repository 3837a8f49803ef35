"""What is to be compiled, what comes of it, and how long it may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minisgl_backend.errors import MinisglError
from minisgl_backend.request import Grammar

# (xgrammar's CompiledGrammar, None) or (None, why not).
Outcome = tuple[Any, MinisglError | None]


@dataclass(frozen=True)
class Job:
    """A grammar to be compiled. Both functions are called on a compiler's thread, or on that of `submit`."""

    grammar: Grammar
    is_awaited: Callable[[], bool]  # False: somebody has cancelled it
    done: Callable[[Any, MinisglError | None], None]  # of an Outcome


@dataclass(frozen=True)
class Limits:
    """Of compilers. Seconds are those of the clock on the wall."""

    quick_s: float = 1.0  # what takes longer is slow
    deadline_s: float = 30.0  # for one that is slow, beyond the quick_s after which it is
    poll_s: float = 0.2  # between looks whether somebody still waits for a slow one
    idle_s: float = 60.0  # after which all workers but one end
    max_quick: int = 1  # workers for those that are not known to be slow, where many wait
    queue_per_worker: int = 8  # that wait for a worker: then another one starts
    max_slow: int = 2  # at a time, each of which takes a processor
    max_slow_waiting: int = 16
