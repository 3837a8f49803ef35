"""Opens a GPU while torch is being imported: the driver takes half a second, without the interpreter's lock (GIL)."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress


class OpenedDevice:
    """A GPU context for torch, created on a thread; none without a driver or that GPU.

    Errors of the driver are left to torch, which calls the same functions again. Ranks above 0 do not use this: they
    import torch before they know their rank.
    """

    def __init__(self, index: int) -> None:
        # As torch sets it. Drivers before CUDA 12.2 read it here, and would otherwise load all kernels of all
        # libraries.
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
        self._close: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._open, args=(index,), name="open device", daemon=True)
        with suppress(RuntimeError):  # no thread is left: torch opens the device later
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
        """Releases the context if torch computes on the CPU; on a GPU it stays open until the process ends."""
        if self._thread.ident is not None:
            self._thread.join()
        self._close()
