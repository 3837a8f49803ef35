"""Memory of each rank's GPU that the other ranks' GPUs read and write, by CUDA IPC through the driver's own interface.

torch has symmetric memory for this, but it wants a process group that is registered by name, and creates NVLink
multicast objects unless it is told not to; this is all that a sum over ranks needs of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1  # when it is used first


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class PeerMemory:
    """One allocation of this rank's, and those of the other ranks once they are opened.

    Used by one thread at a time; `close` by any. Raises OSError where the driver is missing or refuses.
    """

    def __init__(self, num_bytes: int, word: int, word_bytes: int, device: torch.device) -> None:
        """Allocates memory that holds `word`, a signed integer of word_bytes (2 or 4), everywhere."""
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        self._own = ctypes.c_uint64()
        self._opened: list[ctypes.c_uint64] = []
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context this thread's
            self._call("cuCtxGetCurrent", ctypes.byref(self._context))
            self._call("cuMemAlloc_v2", ctypes.byref(self._own), ctypes.c_size_t(num_bytes))
            try:
                fill = f"cuMemsetD{8 * word_bytes}_v2"
                number = (ctypes.c_uint16 if word_bytes == 2 else ctypes.c_uint32)(word)
                self._call(fill, self._own, number, ctypes.c_size_t(num_bytes // word_bytes))
                torch.cuda.synchronize()
            except OSError:
                self.close()
                raise

    @property
    def address(self) -> int:
        return self._own.value

    def handle(self) -> bytes:
        """What other processes of this machine open the memory with; HANDLE_BYTES long."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), self._own)
        return bytes(handle)

    def open(self, handles: Sequence[bytes]) -> list[int]:
        """Opens other ranks' memory; the addresses at which this process sees it."""
        addresses = []
        self._call("cuCtxSetCurrent", self._context)
        for data in handles:
            opened = ctypes.c_uint64()
            handle = _Handle.from_buffer_copy(data)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(opened), handle, ctypes.c_uint(_ENABLE_PEER_ACCESS))
            self._opened.append(opened)
            addresses.append(opened.value)
        return addresses

    def leave(self) -> None:
        """Closes the other ranks' memory. No kernel of this rank may use it any more."""
        opened, self._opened = self._opened, []
        if opened:
            self._call("cuCtxSetCurrent", self._context)
        for one in opened:
            self._call("cuIpcCloseMemHandle", one)

    def close(self) -> None:
        """Gives all of it back. No kernel may use it any more, and all other ranks have left: what becomes of memory
        that is freed while another process has it open is not defined."""
        self.leave()
        own, self._own = self._own, ctypes.c_uint64()
        if own.value:
            self._call("cuCtxSetCurrent", self._context)
            self._call("cuMemFree_v2", own)

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(self._driver, name)(*arguments)
        if error:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(error, ctypes.byref(text))
            raise OSError(f"{name} says: {(text.value or b'?').decode()} ({error})")
