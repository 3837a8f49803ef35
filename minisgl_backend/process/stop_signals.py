"""What ends a command: SIGINT, SIGTERM, SIGHUP, told on a thread of its own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


def on_stop_signals(callback: Callable[[], None]) -> None:
    """Calls `callback` for each of them, for the rest of this process; by the main thread.

    Not in a handler: that runs on the main thread between two instructions of whatever it does, and an Event that it is
    just waiting for has its lock taken then. Python's own handler writes a signal's number into a pipe instead. A
    SIGHUP that is ignored stays so, which is what nohup is for.
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
