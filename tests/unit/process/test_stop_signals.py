"""Signals that end a command: each is told, whatever the main thread is doing."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNTS = """
import os, signal, threading, time
from minisgl_backend.process.stop_signals import on_stop_signals
signal.signal(signal.SIG{name}, signal.SIG_{before})
stop = threading.Event()
told = []
on_stop_signals(lambda: (told.append(1), stop.set()))
def send():
    for _ in range({count}):
        os.kill(os.getpid(), signal.SIG{name})
        time.sleep(0.0002)
sender = threading.Thread(target=send)
sender.start()
end = time.monotonic() + 20
while sender.is_alive() and time.monotonic() < end:
    stop.wait(0.00001)  # its lock is taken nearly all of the time
sender.join(1)
time.sleep(0.2)
print(len(told))
"""


def count_told(name: str, before: str, count: int) -> int:
    """How many of so many signals are told. `before`: what was to happen with them when the command started."""
    code = COUNTS.format(name=name, before=before, count=count)
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    return int(done.stdout)


def test_signals_while_the_main_thread_waits_for_them() -> None:
    """Handlers that set an Event would wait for ever for the lock that the main thread has."""
    assert count_told("TERM", "DFL", 1500) > 100  # those that come at the same time are one


@pytest.mark.parametrize("name", ["INT", "HUP"])
def test_the_other_signals(name: str) -> None:
    assert count_told(name, "DFL", 3) > 0


def test_nohup_is_heeded() -> None:
    assert count_told("HUP", "IGN", 3) == 0
