"""The signals that end a command (SIGINT, SIGTERM, SIGHUP): handled on a thread, or deferred for a moment."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


def on_stop_signals(callback: Callable[[], None]) -> None:
    """Calls `callback` for each of them, for the rest of this process; to be called by the main thread.

    Not in a signal handler: that runs on the main thread between two instructions, perhaps while it holds the lock of
    an Event that it waits for. Instead, Python's own handler writes the signal's number into a pipe. A SIGHUP that is
    ignored stays ignored, as nohup needs.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)

    def tell() -> None:
        while numbers := os.read(reading, 64):
            for _ in numbers:
                callback()

    threading.Thread(target=tell, name="stop-signals", daemon=True).start()


@contextlib.contextmanager
def interrupted_at_the_end() -> Iterator[None]:
    """Defers Ctrl-C until the end of the block: in the middle of a step it would leave an unusable engine, and other
    ranks that wait for this one. A second Ctrl-C is not deferred."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(frame)
        if len(came) == 2:
            handler(number, came[0])  # asyncio's, for example, only records the first
        if len(came) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(came) == 1:
            handler(signal.SIGINT, came[0])
