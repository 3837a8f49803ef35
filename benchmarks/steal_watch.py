"""When a hypervisor gave this machine's processors to others, from /proc/stat, and whether idle ones might sleep."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

EVERY_S = 0.5
WAKE_UP_DEVICE = Path("/dev/cpu_dma_latency")  # reads as the longest wake-up time that anybody can bear now
NO_LIMIT_US = 2_000_000_000


class StealWatch:
    """Looks every half second, from a thread of its own, for the length of a `with` block."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int, int]] = []  # time.monotonic() seconds, stolen ticks, all ticks; since boot
        self._wake_up_us: list[int] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="steal-watch", daemon=True)

    def __enter__(self) -> StealWatch:
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()
        self._look()

    @property
    def percent(self) -> float:
        """Of all processors' time, what others got."""
        first, last = self._seen[0], self._seen[-1]
        return 100 * (last[1] - first[1]) / max(1, last[2] - first[2])

    @property
    def wake_up_limit_us(self) -> int | None:
        """The shortest wake-up time that somebody asked of idle processors meanwhile; 0: they poll. None: no limit."""
        shortest = min(self._wake_up_us, default=NO_LIMIT_US)
        return shortest if shortest < NO_LIMIT_US else None

    def undisturbed(self, moments: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Whether each moment, time.monotonic() seconds [n], lies in a half second in which nothing was stolen.

        Nothing that shows: the kernel counts in ticks of 10 ms.
        """
        times = np.array([moment for moment, _, _ in self._seen])
        stolen = np.diff([ticks for _, ticks, _ in self._seen])
        places = np.searchsorted(times, moments, side="right") - 1
        inside = (places >= 0) & (places < len(stolen))
        return inside & (stolen[np.clip(places, 0, len(stolen) - 1)] == 0)

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            self._look()

    def _look(self) -> None:
        values = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        self._seen.append((time.monotonic(), values[7], sum(values)))
        with contextlib.suppress(OSError):
            self._wake_up_us.append(int.from_bytes(WAKE_UP_DEVICE.read_bytes()[:4], "little"))
