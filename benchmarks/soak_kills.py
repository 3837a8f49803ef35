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

    victim: str  # "rank 1", "engine 1 rank 0", "tokenizer"
    at: float  # time.monotonic()
    told: list[float] = field(default_factory=list)  # until each request that was under way got UNAVAILABLE
    served_again: float | None = None  # until a new request was answered


class Killer:
    """Kills one process after the other, evenly over a run, and waits each time until the server serves again."""

    def __init__(
        self, served: Served, *, cores: int, ranks: int, kills: int, stub_kills: int, draw: random.Random
    ) -> None:
        """`kills` are those of the ranks of engine cores, each equally often; `stub_kills` of tokenizer processes."""
        self._served = served
        self._places = {
            f"rank {rank}" if cores == 1 else f"engine {core} rank {rank}": (core, rank)
            for rank in range(ranks)
            for core in range(cores)
        }
        names = list(self._places)
        self._victims = [names[number % len(names)] for number in range(kills)] + ["tokenizer"] * stub_kills
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
        whole = before if victim == "tokenizer" else self._served.ranks(self._places[victim][0])
        with self._lock:
            self.kills.append(Kill(victim, time.monotonic()))
        os.kill(before[0], signal.SIGKILL)
        self._wait_until_served(self.kills[-1], whole)
        self._served.wait(self._is_complete)

    def _pids(self, victim: str) -> list[int]:
        if victim == "tokenizer":
            return self._served.stubs(victim)
        core, rank = self._places[victim]
        return [self._served.ranks(core)[rank]]

    def _is_complete(self) -> bool:
        """Whether all ranks of all engine cores run, so that the next victim is there."""
        try:
            return all(rank < len(self._served.ranks(core)) for core, rank in self._places.values())
        except EngineDeadError:
            return False

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
