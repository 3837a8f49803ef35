"""Jobs of the grammar compilers, their outcomes, and the compilers' limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minisgl_backend.errors import MinisglError
from minisgl_backend.request import Grammar

# (xgrammar's CompiledGrammar, None) or (None, error).
Outcome = tuple[Any, MinisglError | None]


@dataclass(frozen=True)
class Job:
    """A grammar to compile. Both callbacks are called on a worker's thread, or on that of `submit`."""

    grammar: Grammar
    is_awaited: Callable[[], bool]  # False: the request was cancelled
    done: Callable[[Any, MinisglError | None], None]  # called with an Outcome


@dataclass(frozen=True)
class Limits:
    """Limits of all compilers of an engine. Seconds are wall time."""

    quick_s: float = 1.0  # a longer compilation is slow
    deadline_s: float = 30.0  # timeout of a slow compilation, in addition to quick_s
    poll_s: float = 0.2  # how often a slow compilation is checked for cancellation
    idle_s: float = 60.0  # after which all idle workers but one end
    max_quick: int = 1  # workers for grammars that are not known to be slow
    queue_per_worker: int = 8  # queued grammars for each such worker, above which another one starts
    max_slow: int = 2  # slow compilations in parallel, each of which takes a CPU
    max_slow_waiting: int = 16
