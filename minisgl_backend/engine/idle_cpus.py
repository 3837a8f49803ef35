"""Keeps idle processors awake while sequences run, through the interface that the Linux kernel has for it (PM QoS).

A token passes about nine threads on its way to a client, and each may find its processor asleep. In a virtual machine a
sleeping processor belongs to the hypervisor, and getting it back takes 0.2 ms, on a busy host several (docs/path.md has
figures); on bare metal the deeper sleep states take 0.1 ms. While a process holds a file open that contains the longest
tolerated wake-up latency, the kernel lets no processor sleep deeper; 0 makes idle processors poll. When the process
ends, in whatever way, the kernel drops the request.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

DEVICE = Path("/dev/cpu_dma_latency")
DRIVER = Path("/sys/devices/system/cpu/cpuidle/current_driver")
VIRTUAL_DRIVER = "haltpoll"  # the idle driver of virtual machines on KVM
LINGER_S = 1.0  # the next sequence often comes soon


class IdleCpus:
    """One process's request to the kernel. `mode`: poll, sleep (the kernel decides), or auto (poll in a VM)."""

    def __init__(self, mode: str, *, device: Path = DEVICE, driver: Path = DRIVER) -> None:
        self._device = device
        self._asks = mode == "poll" or (mode == "auto" and _driver(driver) == VIRTUAL_DRIVER)
        self._loud = mode == "poll"
        self._file: int | None = None
        self._idle_since: float | None = None

    @property
    def asks(self) -> bool:
        """Whether it sends requests when there is work; False once one was refused."""
        return self._asks

    @property
    def awake(self) -> bool:
        return self._file is not None

    def note(self, busy: bool, now: float) -> None:
        """Call it when work begins, and regularly while there is none; `now` in seconds of a monotonic clock."""
        if busy:
            self._idle_since = None
            if self._file is None and self._asks:
                self._open()
        elif self._idle_since is None:
            self._idle_since = now
        elif self._file is not None and now - self._idle_since >= LINGER_S:
            self.close()

    def close(self) -> None:
        """Lets the processors sleep again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> None:
        try:
            self._file = os.open(self._device, os.O_WRONLY | os.O_CLOEXEC)
            os.write(self._file, bytes(4))  # an int32: microseconds
        except OSError as error:
            self.close()
            self._asks = False
            log.log(
                logging.WARNING if self._loud else logging.INFO,
                "idle processors sleep while sequences run (idle_cpus): %s. Run as root; in a container, with "
                "--device %s", error, self._device,
            )  # fmt: skip


def _driver(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
