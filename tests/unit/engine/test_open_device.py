"""The device is opened beside the import of torch, and nothing is said where there is none."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from minisgl_backend.engine.open_device import open_device_ahead


class Driver:
    """A driver with as many devices; counts what is kept open."""

    def __init__(self, num_devices: int, state: int = 0) -> None:
        self.num_devices, self.state, self.opened = num_devices, state, list[int]()

    def cuInit(self, flags: int) -> int:
        return self.state

    def cuDeviceGet(self, device: Any, index: int) -> int:
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = 10 + index
        return 0 if index < self.num_devices else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        self.opened.append(device.value)
        return 0


def opened_by(monkeypatch: pytest.MonkeyPatch, driver: Driver | OSError, index: int) -> None:
    def load(name: str) -> Driver:
        assert name == "libcuda.so.1"
        if isinstance(driver, OSError):
            raise driver
        return driver

    failures: list[Any] = []
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(threading, "excepthook", failures.append)
    before = set(threading.enumerate())
    open_device_ahead(index)
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert not failures


def test_the_rank_s_own_device_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(num_devices=4)
    opened_by(monkeypatch, driver, index=2)
    assert driver.opened == [12]


@pytest.mark.parametrize("driver", [Driver(num_devices=2), Driver(num_devices=4, state=100)])
def test_what_is_not_there_is_left_to_torch(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    opened_by(monkeypatch, driver, index=2)
    assert driver.opened == []


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    opened_by(monkeypatch, OSError("libcuda.so.1: cannot open shared object file"), index=0)
