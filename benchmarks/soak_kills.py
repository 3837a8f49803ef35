"""Who kills what during a soak, and how long everybody else waits because of it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.served import PATIENCE_SECONDS, Served
from client import Client, ClientError
from minisgl_backend.errors import EngineDeadError

LOOK_SECONDS = 0.1  # between two questions whether the server serves again


@dataclass
class Kill:
    """One process killed, and what followed. Times are seconds from the kill."""

    victim: str  # "rank 1", "tokenizer"
    at: float  # time.monotonic()
    told: list[float] = field(default_factory=list)  # until each request that was under way got UNAVAILABLE
    served_again: float | None = None  # until a new request was answered


class Killer:
    """Kills one process after the other, evenly over a run, and waits each time until the server serves again."""

    def __init__(self, served: Served, *, ranks: int, kills: int, stub_kills: int, draw: random.Random) -> None:
        """`kills` are those of engine ranks, each rank equally often; `stub_kills` of tokenizer processes."""
        self._served = served
        self._victims = [f"rank {number % ranks}" for number in range(kills)] + ["tokenizer"] * stub_kills
        draw.shuffle(self._victims)
        self._lock = threading.Lock()
        self.kills: list[Kill] = []

    def run(self, progress: Callable[[], float], is_over: Callable[[], bool]) -> None:
        """Until all victims are dead or the run is over; `progress` goes from 0 to 1.

        Raises EngineDeadError where the server does not serve again.
        """
        for number, victim in enumerate(self._victims):
            while progress() < (number + 0.5) / len(self._victims):
                if is_over():
                    return
                time.sleep(LOOK_SECONDS)
            if is_over():
                return
            self._kill(victim)

    def note_told(self, started: float) -> None:
        """A request that was sent at `started` (time.monotonic()) has just been answered UNAVAILABLE."""
        now = time.monotonic()
        with self._lock:
            if self.kills and started < self.kills[-1].at:
                self.kills[-1].told.append(now - self.kills[-1].at)

    def _kill(self, victim: str) -> None:
        before = self._pids(victim)
        # All ranks start again together: a request that is answered by the old core proves nothing.
        whole = before if victim == "tokenizer" else self._served.ranks()
        with self._lock:
            self.kills.append(Kill(victim, time.monotonic()))
        os.kill(before[0], signal.SIGKILL)
        self._wait_until_served(self.kills[-1], whole)

    def _pids(self, victim: str) -> list[int]:
        if victim == "tokenizer":
            return self._served.stubs(victim)
        return [self._served.ranks()[int(victim.split()[1])]]

    def _wait_until_served(self, kill: Kill, gone: Sequence[int]) -> None:
        with Client(self._served.grpc, timeout=PATIENCE_SECONDS) as client:
            while time.monotonic() - kill.at < PATIENCE_SECONDS:
                try:
                    if not set(gone) & {process.pid for process in self._served.processes()}:
                        client.generate("Hello", max_tokens=1)
                        kill.served_again = time.monotonic() - kill.at
                        return
                except ClientError:
                    pass
                time.sleep(LOOK_SECONDS)
        raise EngineDeadError(f"not served again {PATIENCE_SECONDS:g} s after {kill.victim} was killed")


def figures(kills: Sequence[Kill]) -> dict[str, object]:
    """How long requests waited for their UNAVAILABLE, and how long it took to serve again; seconds."""
    return {
        "kills": len(kills),
        "told_s": summary([told for kill in kills for told in kill.told]),
        "served_again_s": summary([kill.served_again for kill in kills if kill.served_again is not None]),
    }


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Count, median and maximum; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return {"count": len(ordered), "p50": round(ordered[len(ordered) // 2], 2), "max": round(ordered[-1], 2)}
