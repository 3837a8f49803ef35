"""Memory of each rank's GPU that the other ranks' GPUs read and write, by CUDA IPC through the driver API.

torch has symmetric memory for this, but it needs a process group that is registered by name, and creates NVLink
multicast objects unless told not to. This is the part of it that the collectives here need.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

HANDLE_BYTES = 64
TRIAL_S = 60.0  # the other rank may still compile the kernel
_ENABLE_PEER_ACCESS = 1  # lazily, when it is first used

T = TypeVar("T")
Summed = tuple[torch.Tensor, torch.Tensor]  # a residual with a sum added, and its norm


@dataclass(frozen=True)
class Peers:
    """The ranks of an engine core as one of them sees them, with collectives that all call at the same time."""

    rank: int
    size: int
    device: torch.device  # this rank's
    gather: Callable[[torch.Tensor], torch.Tensor]  # as in TensorParallel
    minimum: Callable[[int], int]

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class PeerMemory:
    """One allocation of this rank, and those of the other ranks once they are opened.

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
        """Handle with which other processes of this machine open the memory; HANDLE_BYTES long."""
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

    def write_word(self, address: int, word: int, stream: torch.cuda.Stream) -> None:
        """Writes a signed integer of 4 bytes to an address of this process, in stream order: a reader that sees it also
        sees what the stream wrote before. The device needs no multiprocessor for this."""
        value = ctypes.c_uint32(word)
        queue = ctypes.c_void_p(stream.cuda_stream)
        self._call("cuStreamWriteValue32_v2", queue, ctypes.c_uint64(address), value, ctypes.c_uint(0))

    def leave(self) -> None:
        """Closes the other ranks' memory. No kernel of this rank may use it any more."""
        opened, self._opened = self._opened, []
        if opened:
            self._call("cuCtxSetCurrent", self._context)
        for one in opened:
            self._call("cuIpcCloseMemHandle", one)

    def close(self) -> None:
        """Frees all of it. No kernel may use it any more, and all other ranks must have called `leave`: freeing memory
        that another process has open is undefined behaviour."""
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
            raise OSError(f"{name} failed: {(text.value or b'?').decode()} ({error})")


class PeerCollective:
    """One rank's side of something that the ranks do through memory that they share. All ranks construct it at the same
    time and call it in the same order."""

    def __init__(self, memory: PeerMemory, stop: torch.Tensor) -> None:
        """stop: see `stop_word`."""
        self._memory, self._stop = memory, stop

    def stop(self) -> None:
        """Ends kernels that wait for a rank, now and later; their results must not be used. On any thread."""
        self._stop.fill_(1)

    def close(self) -> None:
        """Frees the memory: once this rank computes nothing more, and the others have closed it."""
        self._memory.close()


def stop_word() -> torch.Tensor:
    """int32 [1] in host memory mapped to the device: waiting kernels end once it is not 0."""
    return torch.zeros(1, dtype=torch.int32).pin_memory()


def open_together(
    peers: Peers,
    others: Sequence[int],
    *,
    allocate: Callable[[], PeerMemory],
    use: Callable[[PeerMemory, Mapping[int, int]], T],
    trial: Callable[[T], str],
    problem: str = "",
) -> T:
    """Opens the memory of all ranks, and returns `use`(this rank's memory, addresses of the others', by rank).

    All ranks call this at the same time. others: whose memory this rank opens. `trial` tests the result and returns
    what is wrong, or ""; `problem`: what is known to be wrong before. Raises OSError, on all ranks alike, where the
    GPUs cannot reach each other's memory or something is wrong on one of them.
    """
    device, minimum = peers.device, peers.minimum
    memory, handle = None, bytes(HANDLE_BYTES)
    if not problem:
        if not all(torch.cuda.can_device_access_peer(device, _gpu_of(other, peers)) for other in others):
            problem = "a GPU has no access to another one's memory"
        else:
            try:
                memory = allocate()
                handle = memory.handle()
            except OSError as error:
                problem = str(error)
    handles = peers.gather(torch.frombuffer(bytearray(handle), dtype=torch.uint8).to(device)).cpu()
    made = None
    if _all_well(problem, minimum) and memory is not None:
        try:
            opened = memory.open([bytes(handles[one].tolist()) for one in others])
            made = use(memory, dict(zip(others, opened, strict=True)))
        except OSError as error:
            problem = str(error)
        if _all_well(problem, minimum) and made is not None:
            try:
                problem = trial(made)
            except OSError as error:
                problem = str(error)
            if _all_well(problem, minimum):
                return made
    if memory is not None:
        with contextlib.suppress(OSError):  # the other ranks wait for this one below
            memory.leave()
    minimum(0)  # until all have left each other's memory, none may free its own
    if memory is not None:
        memory.close()
    raise OSError(problem or "another rank could not share its memory")


def ends_in_time(stop: Callable[[], None]) -> bool:
    """Whether the work on the current stream ends within TRIAL_S; else calls `stop`, which ends it."""
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + TRIAL_S
    while not done.query():
        if time.monotonic() > deadline:
            stop()
            done.synchronize()
            return False
        time.sleep(0.001)
    return True


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor of `device` over memory that it does not own. The memory may be on another GPU, of which
    torch's other ways to wrap memory would make a tensor of that GPU."""
    strides = torch.empty(shape, device="meta").stride()
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, strides)  # type: ignore[call-overload]


def _gpu_of(other: int, peers: Peers) -> int:
    """Index of another rank's GPU: the ranks of an engine core have consecutive GPUs."""
    return (peers.device.index or 0) - peers.rank + other


def _all_well(problem: str, minimum: Callable[[int], int]) -> bool:
    return minimum(0 if problem else 1) == 1
