"""Opens a GPU while torch is being imported: the driver needs half a second for it, without the interpreter's lock."""

from __future__ import annotations

import ctypes
import os
import threading


def open_device_ahead(index: int) -> None:
    """Has a thread make the context of this GPU that torch will use; without a driver or that GPU nothing happens.

    What is wrong with the driver is told by torch, which calls the same functions again.
    """
    # As torch has it. Drivers before CUDA 12.2 read it here, and would load all kernels of all libraries otherwise.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    threading.Thread(target=_open, args=(index,), name="open device", daemon=True).start()


def _open(index: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # until the process ends
