"""Opens a GPU while torch is being imported: the driver needs half a second for it, without the interpreter's lock."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress


class OpenedDevice:
    """A GPU's context that torch will use, made by a thread; none without a driver or that GPU.

    What is wrong with the driver is told by torch, which calls the same functions again. Ranks behind the first one do
    without: they import torch before they know which they are.
    """

    def __init__(self, index: int) -> None:
        # As torch has it. Drivers before CUDA 12.2 read it here, and would load all kernels of all libraries otherwise.
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
        self._close: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._open, args=(index,), name="open device", daemon=True)
        with suppress(RuntimeError):  # no thread is left: torch opens it later
            self._thread.start()

    def _open(self, index: int) -> None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
            return
        if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0:
            self._close = lambda: driver.cuDevicePrimaryCtxRelease(device)

    def close(self) -> None:
        """Where torch computes on processors; on a GPU it stays open until the process ends."""
        if self._thread.ident is not None:
            self._thread.join()
        self._close()
