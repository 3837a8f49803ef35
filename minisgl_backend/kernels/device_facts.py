"""Device properties by which kernels are chosen: read once from this machine's GPU, or by name from data sheets."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.cpu.library import has_bfloat16_units
from minisgl_backend.kernels.linear.libraries import vllm as vllm_library

# Packages of published kernels for GEMMs, and distributions that have them.
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"sgl_kernel": ("sgl-kernel", "sglang-kernel"), vllm_library.PACKAGE: ("vllm",)}
)
TORCH_BLOCKS = "torch: FP8 in blocks"  # listed as a library: torch for CUDA 12.9 or later; removed where a trial fails
# Likewise: a grouped GEMM of sgl-kernel, on whose version it depends.
SGL_EXPERTS = "sgl-kernel: FP8 experts in blocks"
LARGEST_SHARED = 227 << 10  # bytes of shared memory that a program can have on any GPU
# Shared memory of a program, by compute capability; in between, that of the next lower one.
_SHARED = {(7, 5): 64 << 10, (8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10}
_SHARED |= {(9, 0): LARGEST_SHARED, (11, 0): LARGEST_SHARED, (12, 0): 99 << 10}


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """One device. Rates are nominal, from the data sheet, unless measured; None: unknown."""

    kind: str  # "cpu" or "cuda"
    name: str
    capability: tuple[int, int] | None  # (9, 0) for Hopper; None on the CPU
    multiprocessors: int  # an H200 has 132; 0 on the CPU
    shared_memory: int = LARGEST_SHARED  # bytes that a program may have; a CPU has no limit of its own
    own_kernels: bool = True  # this project's kernels run here: Triton is installed, or the CPU's could be compiled
    bfloat16_units: bool = True  # it multiplies bfloat16: a CPU has AVX-512 BF16, or its GEMMs in it are slow
    dependent_launch: bool = False  # programmatic dependent launch (PDL): Hopper and later
    tensor_memory: bool = False  # tensor memory access (TMA): Hopper and later, with a Triton that has its descriptors
    libraries: frozenset[str] = frozenset()  # those of DISTRIBUTIONS that are installed, TORCH_BLOCKS, SGL_EXPERTS
    bytes_per_s: float | None = None  # of memory
    flop_per_s: float | None = None  # of dense bfloat16 GEMMs

    @classmethod
    def of(cls, device: torch.device) -> DeviceFacts:
        """Facts of a device of this process. A CPU's kernels are assumed to be compiled already."""
        if device.type != "cuda":
            return cls.cpu(bfloat16_units=has_bfloat16_units())
        return _of_gpu(torch.cuda.current_device() if device.index is None else device.index)

    @classmethod
    def cpu(cls, own_kernels: bool = True, bfloat16_units: bool = True) -> DeviceFacts:
        facts = cls(kind="cpu", name="CPU", capability=None, multiprocessors=0)
        return replace(facts, own_kernels=own_kernels, bfloat16_units=bfloat16_units)

    @classmethod
    def named(cls, name: str) -> DeviceFacts:
        """Facts of one of NAMED. Raises ConfigError for other names."""
        if name not in NAMED:
            raise ConfigError(f"device_facts is {name!r}; allowed: {', '.join(NAMED)}")
        return NAMED[name]


def shared_memory_of(capability: tuple[int, int]) -> int:
    """Bytes that a program may have on GPUs of a compute capability."""
    return _SHARED[max((known for known in _SHARED if known <= capability), default=(7, 5))]


def _gpu(
    name: str,
    capability: tuple[int, int],
    multiprocessors: int,
    *,
    shared_memory: int | None = None,
    has_triton: bool = True,
    has_descriptors: bool = True,
    libraries: frozenset[str] | None = None,
    bytes_per_s: float | None = None,
    flop_per_s: float | None = None,
) -> DeviceFacts:
    is_hopper = capability >= (9, 0)
    return DeviceFacts(
        kind="cuda",
        name=name,
        capability=capability,
        multiprocessors=multiprocessors,
        shared_memory=shared_memory or shared_memory_of(capability),
        own_kernels=has_triton,
        dependent_launch=is_hopper,
        tensor_memory=is_hopper and has_descriptors,
        libraries=frozenset({*DISTRIBUTIONS, TORCH_BLOCKS, SGL_EXPERTS}) if libraries is None else libraries,
        bytes_per_s=bytes_per_s,
        flop_per_s=flop_per_s,
    )


# From NVIDIA's data sheets, all software installed; dense bfloat16, of the SXM modules where there are several.
NAMED: Mapping[str, DeviceFacts] = MappingProxyType(
    {
        "h100": _gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, bytes_per_s=3.35e12, flop_per_s=989e12),
        "h200": _gpu("NVIDIA H200", (9, 0), 132, bytes_per_s=4.8e12, flop_per_s=989e12),
        "a100": _gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, bytes_per_s=2.039e12, flop_per_s=312e12),
        "l40s": _gpu("NVIDIA L40S", (8, 9), 142, bytes_per_s=0.864e12, flop_per_s=362e12),
    }
)


def _is_installed(package: str) -> bool:
    if package == vllm_library.PACKAGE:
        return vllm_library.is_installed()  # it is not imported
    with suppress(ImportError, ValueError):  # half removed, or a stub
        return importlib.util.find_spec(package) is not None
    return False


@cache
def _of_gpu(index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    has_triton = importlib.util.find_spec("triton") is not None
    known = next((facts for facts in NAMED.values() if facts.name == properties.name), None)
    return _gpu(
        properties.name,
        (properties.major, properties.minor),
        properties.multi_processor_count,
        shared_memory=getattr(properties, "shared_memory_per_block_optin", None),
        has_triton=has_triton,
        has_descriptors=has_triton and importlib.util.find_spec("triton.tools.tensor_descriptor") is not None,
        libraries=frozenset(filter(_is_installed, DISTRIBUTIONS)) | {TORCH_BLOCKS, SGL_EXPERTS},
        bytes_per_s=None if known is None else known.bytes_per_s,
        flop_per_s=None if known is None else known.flop_per_s,
    )
