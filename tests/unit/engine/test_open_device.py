"""The device is opened beside the import of torch, and nothing is said where there is none."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from minisgl_backend.engine.open_device import OpenedDevice

PATIENCE_SECONDS = 30.0  # far above what is ever needed: the machine may be busy


class Driver:
    """A driver with as many devices; knows what is kept open."""

    def __init__(self, num_devices: int, state: int = 0) -> None:
        self.num_devices, self.state, self.opened = num_devices, state, list[int]()
        self.asked, self.answers = threading.Event(), threading.Event()
        self.answers.set()

    def cuInit(self, flags: int) -> int:
        self.asked.set()
        self.answers.wait(PATIENCE_SECONDS)
        return self.state

    def cuDeviceGet(self, device: Any, index: int) -> int:
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = 10 + index
        return 0 if index < self.num_devices else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        self.opened.append(device.value)
        return 0

    def cuDevicePrimaryCtxRelease(self, device: ctypes.c_int) -> int:
        self.opened.remove(device.value)
        return 0


@pytest.fixture(autouse=True)
def failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread fails, and the environment stays as it is."""
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    found: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", found.append)
    yield
    assert not found


def load(monkeypatch: pytest.MonkeyPatch, driver: Driver | OSError) -> None:
    def library(name: str) -> Driver:
        assert name == "libcuda.so.1"
        if isinstance(driver, OSError):
            raise driver
        return driver

    monkeypatch.setattr(ctypes, "CDLL", library)


def opened(index: int) -> OpenedDevice:
    device = OpenedDevice(index)
    device._thread.join()
    return device


def test_the_rank_s_own_device_is_opened_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(num_devices=4)
    load(monkeypatch, driver)
    device = opened(index=2)
    assert driver.opened == [12]
    device.close()
    assert driver.opened == []


@pytest.mark.parametrize("driver", [Driver(num_devices=2), Driver(num_devices=4, state=100)])
def test_what_is_not_there_is_left_to_torch(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    load(monkeypatch, driver)
    opened(index=2).close()
    assert driver.opened == []


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, OSError("libcuda.so.1: cannot open shared object file"))
    opened(index=0).close()


def test_nobody_waits_for_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(num_devices=1)
    driver.answers.clear()
    load(monkeypatch, driver)
    device = OpenedDevice(0)
    assert driver.asked.wait(PATIENCE_SECONDS / 2)
    assert driver.opened == [], "who waits finds it open"
    driver.answers.set()
    device._thread.join()
    assert driver.opened == [10]
    device.close()
    assert driver.opened == []


def test_a_machine_without_a_thread_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        device = OpenedDevice(0)
    device.close()


def test_the_kernels_of_libraries_are_loaded_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, OSError())
    opened(index=0)
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER", "as the user says"
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    opened(index=0)
    assert os.environ["CUDA_MODULE_LOADING"] == "LAZY"


IMPORT = """
import ctypes, sys
from minisgl_backend.config import EngineConfig
from minisgl_backend.environment import Environment
from minisgl_backend.engine import build
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.folder import find_model_dir
from tests.unit.engine.test_open_device import Driver
driver, right = Driver(num_devices=4), ctypes.CDLL
class Patched(right):
    def __new__(cls, name, *args, **kwargs):
        return driver if name == "libcuda.so.1" else super().__new__(cls)
ctypes.CDLL = Patched
retain, told = driver.cuDevicePrimaryCtxRetain, []
driver.cuDevicePrimaryCtxRetain = lambda context, device: told.append(device.value) or retain(context, device)
config = EngineConfig(dp=4, dummy_weights=True)  # no GPU is asked for its memory
folder = find_model_dir(config.model)
model = ModelConfig.load(folder)
assert "torch" not in sys.modules
"""
LOADED = """
opened = build._load_torch(3)
assert "torch" in sys.modules
opened._thread.join()
assert told == driver.opened == [13]
assert build._load_torch(3) is None
"""
RESOLVED = """
import dataclasses
load = build._load_torch
def load_and_tell(first_device):
    opened = load(first_device)
    import torch
    from minisgl_backend.runner.start.device import MachineFacts
    torch.version.cuda = "12.8"
    facts = dataclasses.replace(MachineFacts.detect(), count=4, **FACTS)
    MachineFacts.detect = lambda: facts
    return opened
opened = load_and_tell(3)
from minisgl_backend.engine.model_start import resolve_here
from minisgl_backend.engine.start import Start
start = Start(
    config=config, environment=Environment.read(), model_dir=folder, model=model, dp_rank=3, owns_process=False,
    on_loss=print, heartbeat=None, phases=None,
)
runtime, _ = resolve_here(start, opened)
assert told == [13]
assert driver.opened == ([] if runtime.device == "cpu" else [13])
"""
ON_CPU = {"kind": "cpu", "capability": None}  # where the driver is too old for torch, or hidden from it
ON_GPU = {"kind": "cuda", "capability": (8, 0)}


def test_it_is_opened_beside_the_import_of_torch() -> None:
    subprocess.run([sys.executable, "-c", IMPORT + LOADED], check=True)


@pytest.mark.parametrize("facts", [ON_CPU, ON_GPU])
def test_it_is_closed_where_torch_computes_on_processors(facts: dict[str, object]) -> None:
    subprocess.run([sys.executable, "-c", IMPORT + RESOLVED.replace("FACTS", str(facts))], check=True)
