"""Heartbeats of the engine's processes, and how a missing one is interpreted.

Each process of an engine sends a heartbeat every second, on a thread of its own, that says what its main thread is
doing. A process is ended for two reasons: silence, since then it is stopped or stuck in a call that never returns; and
a step that does not end, since then it waits in vain for a rank that left or a device that does not answer. Work that
may take long is announced: starting, compiling a kernel, and steps that the CPU computes.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

PERIOD_S = 1.0  # from one heartbeat to the next
LONG_S = 300.0  # allowed for announced long work


class Sign(bytes, enum.Enum):
    """What one heartbeat says about its process."""

    WELL = b"."
    LOADING = b"l"  # starting or compiling; may hold the interpreter's lock for long
    COMPUTING = b"c"  # the CPU computes a step
    STUCK = b"s"  # its current step does not end


_SIGNS = frozenset(sign.value for sign in Sign)


@dataclass(eq=False, slots=True)
class _Doing:
    """What the main thread is doing. A new object each time: the same object later means that nothing has moved."""

    sign: Sign
    limit_s: float  # after that long it counts as stuck


class Heartbeat:
    """The heartbeat of this process. The main thread reports what it does; a thread looks every second and sends it on.

    A process starts as LOADING, until `ready`.
    """

    def __init__(self, hang_s: float) -> None:
        """`hang_s`: the longest allowed duration of a step that waits for other ranks or for a device."""
        self._hang_s = hang_s
        self._on_cpu = False
        self._doing: _Doing | None = _Doing(Sign.LOADING, float("inf"))
        self._seen: _Doing | None = None
        self._unmoved_s = 0.0
        self._looked_at: float | None = None
        self.sign = Sign.LOADING  # the latest
        self._on_sign: Callable[[Sign], None] | None = None
        self._closed = threading.Event()

    def start(self, on_sign: Callable[[Sign], None] = lambda sign: None) -> None:
        """From now on calls `on_sign` about every second, on a thread of its own, until `close`; also on the main
        thread when that begins or ends work that may take long.

        A second call changes nothing.
        """
        if self._on_sign is None:
            self._on_sign = on_sign
            on_sign(self.sign)
            threading.Thread(target=self._beat, args=(on_sign,), name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """Ends the thread: no one receives its heartbeats any more."""
        self._closed.set()

    def ready(self, *, on_cpu: bool) -> None:
        """The process has started. `on_cpu`: it computes its steps itself, which may take long."""
        self._on_cpu = on_cpu
        self._turn_to(None)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """What runs inside must end within the limit."""
        before = self._doing
        if before is not None and before.sign is Sign.LOADING:
            yield  # the first steps are part of the start
            return
        self._doing = _Doing(Sign.COMPUTING, LONG_S) if self._on_cpu else _Doing(Sign.WELL, self._hang_s)
        try:
            yield
        finally:
            self._doing = before and _Doing(before.sign, before.limit_s)

    def progress(self) -> None:
        """The work inside `step` has made progress."""
        if self._doing is not None:
            self._doing = _Doing(self._doing.sign, self._doing.limit_s)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, a step that the CPU computes waits for another rank."""
        before = self._doing
        if before is None or before.sign is not Sign.COMPUTING:
            yield
            return
        self._doing = _Doing(Sign.WELL, self._hang_s)
        try:
            yield
        finally:
            self._doing = _Doing(before.sign, before.limit_s)

    def compiling(self) -> None:
        """A compiler runs until `compiled`, or until the step ends."""
        if self._doing is not None and self._doing.sign is not Sign.LOADING:
            self._turn_to(_Doing(Sign.LOADING, LONG_S))

    def compiled(self) -> None:
        """The compiler has ended."""
        doing = self._doing
        if doing is not None and doing.sign is Sign.LOADING and doing.limit_s == LONG_S:
            self._turn_to(_Doing(Sign.WELL, self._hang_s))

    def _turn_to(self, doing: _Doing | None) -> None:
        """Reports at once: in a second this process may be unable to report anything."""
        self._doing = doing
        self.sign = Sign.WELL if doing is None else doing.sign
        if self._on_sign is not None:
            self._on_sign(self.sign)

    def look(self, now: float) -> Sign:
        """The heartbeat to send; to be called every PERIOD_S. `now`: seconds of any monotonic clock.

        Only time in which this thread ran counts: a stopped process or a sleeping machine proves nothing.
        """
        doing = self._doing
        gap = 0.0 if self._looked_at is None else min(now - self._looked_at, 2 * PERIOD_S)
        self._looked_at = now
        self._unmoved_s = self._unmoved_s + gap if doing is self._seen else 0.0
        self._seen = doing
        if doing is None:
            self.sign = Sign.WELL
        else:
            self.sign = Sign.STUCK if self._unmoved_s >= doing.limit_s else doing.sign
            if self.sign is Sign.COMPUTING and self._unmoved_s < 2 * PERIOD_S:
                self.sign = Sign.WELL  # short steps one after the other are no hang
        return self.sign

    def _beat(self, on_sign: Callable[[Sign], None]) -> None:
        while not self._closed.is_set():
            before = self.sign
            sign = self.look(time.monotonic())
            if sign is Sign.STUCK and before is not Sign.STUCK:
                faulthandler.dump_traceback(sys.stderr)  # shows where it hangs
            on_sign(sign)
            self._closed.wait(PERIOD_S)


class Liveness:
    """Interprets another process's heartbeats, or their absence."""

    def __init__(self, hang_s: float) -> None:
        """`hang_s`: how long it may be silent, unless it has announced long work."""
        self._hang_s = hang_s
        self._silent_s = 0.0
        self._looked_at: float | None = None
        self.sign = Sign.LOADING

    def heard(self, data: bytes) -> None:
        """Data has come: heartbeats, the latest last, or anything else, which proves life as well."""
        if data[-1:] in _SIGNS:
            self.sign = Sign(data[-1:])
        self._silent_s, self._looked_at = 0.0, None

    def is_silent(self, now: float) -> bool:
        """Whether there was no heartbeat for too long; to be called about every PERIOD_S.

        Only time in which the watcher itself ran counts.
        """
        if self._looked_at is not None:
            self._silent_s += min(now - self._looked_at, 2 * PERIOD_S)
        self._looked_at = now
        return self._silent_s >= (LONG_S if self.sign is Sign.LOADING else self._hang_s)


def wait_in_vain(signs: list[Sign]) -> bool:
    """Whether processes that compute one step together hang: some are stuck, and no other one is at work."""
    return Sign.STUCK in signs and Sign.LOADING not in signs and Sign.COMPUTING not in signs
