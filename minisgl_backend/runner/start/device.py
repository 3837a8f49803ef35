"""Facts about the device of this process: what it is, how much memory is free."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from minisgl_backend.kernels.cpu.library import cpu_library
from minisgl_backend.process.memory import free_host_bytes


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """One device as it was at start."""

    kind: str  # "cpu" or "cuda"
    name: str
    capability: tuple[int, int] | None  # (9, 0) for Hopper; None on the CPU
    count: int  # devices of this kind that the process sees; 1 on the CPU
    multiprocessors: int  # 132 of an H200; 0 on the CPU
    bfloat16: Callable[[], bool]  # computes in it at full speed; of a CPU the first answer compiles its kernels
    triton: str | None = None  # the version of the package that compiles a GPU's kernels; None: there is none

    @property
    def compute_capability(self) -> int | None:
        """10 * major + minor, as attention backends are chosen by; None on the CPU."""
        return None if self.capability is None else 10 * self.capability[0] + self.capability[1]

    @classmethod
    def detect(cls) -> DeviceFacts:
        """The first CUDA device where there is one, else the CPU."""
        if torch.cuda.is_available():
            return cls._of_cuda()
        return cls(kind="cpu", name="CPU", capability=None, count=1, multiprocessors=0, bfloat16=_cpu_has_kernels)

    @classmethod
    def _of_cuda(cls) -> DeviceFacts:
        properties = torch.cuda.get_device_properties(0)
        major, minor = properties.major, properties.minor
        return cls(
            kind="cuda",
            name=properties.name,
            capability=(major, minor),
            count=torch.cuda.device_count(),
            multiprocessors=properties.multi_processor_count,
            bfloat16=lambda: (major, minor) >= (8, 0),
            triton=_triton_version(),
        )


def _triton_version() -> str | None:
    with suppress(ImportError):
        import triton

        return str(triton.__version__)
    return None


def _cpu_has_kernels() -> bool:
    """Torch alone needs longer for one row of bfloat16 than of float32."""
    return cpu_library() is not None


def free_bytes(device: torch.device) -> int:
    """Memory of the device that nobody uses now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()


def is_out_of_memory(error: BaseException) -> bool:
    """True for the ways of saying that an allocation failed, on either kind of device: torch's, also that of a graph
    outside of its allocator, Triton's where it loads a kernel, and NCCL's."""
    ways = ("can't allocate memory", "CUDA error: out of memory", "[CUDA]: out of memory", "failure 2 'out of memory'")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(way in str(error) for way in ways)
