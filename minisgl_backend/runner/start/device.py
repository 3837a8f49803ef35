"""Facts about the device of this process: what it is, how much memory is free."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from minisgl_backend.kernels.cpu.library import cpu_library
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.process.memory import free_host_bytes


@dataclass(frozen=True, kw_only=True)
class MachineFacts(DeviceFacts):
    """The first device of this process at start, the number of devices, and the software for it."""

    count: int  # devices of this kind that the process sees; 1 on the CPU
    bfloat16: Callable[[], bool]  # whether it is at full speed; on a CPU the first call compiles its kernels
    triton: str | None = None  # version of the package that compiles a GPU's kernels; None: not installed

    @property
    def compute_capability(self) -> int | None:
        """10 * major + minor, for the choice of attention backends; None on the CPU."""
        return None if self.capability is None else 10 * self.capability[0] + self.capability[1]

    @classmethod
    def named(cls, name: str, count: int = 1) -> MachineFacts:
        """`count` GPUs of a kind that `DeviceFacts.named` knows, with all software installed."""
        return cls(**vars(DeviceFacts.named(name)), count=count, bfloat16=lambda: True)

    @classmethod
    def detect(cls) -> MachineFacts:
        """The first CUDA device where there is one, else the CPU."""
        if not torch.cuda.is_available():
            return cls(**vars(DeviceFacts.of(torch.device("cpu"))), count=1, bfloat16=_cpu_has_kernels)
        facts = DeviceFacts.of(torch.device("cuda", 0))
        has_bfloat16 = facts.capability is not None and facts.capability >= (8, 0)
        return cls(
            **vars(facts), count=torch.cuda.device_count(), bfloat16=lambda: has_bfloat16, triton=_triton_version()
        )


def _triton_version() -> str | None:
    with suppress(ImportError):
        import triton

        return str(triton.__version__)
    return None


def _cpu_has_kernels() -> bool:
    """Whether there are compiled CPU kernels: without them bfloat16 is slower than float32 for one row."""
    return cpu_library() is not None


def free_bytes(device: torch.device) -> int:
    """Free memory of the device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation failed, on either kind of device: torch's errors (also those of a graph
    outside its allocator), Triton's when it loads a kernel, and NCCL's."""
    ways = ("can't allocate memory", "CUDA error: out of memory", "[CUDA]: out of memory", "failure 2 'out of memory'")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(way in str(error) for way in ways)
