"""Selects the implementation of `Ops` for a device, and the kernels that go with it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import torch

from minisgl_backend.kernels.candidate import on_gpu
from minisgl_backend.kernels.cpu.library import cpu_library
from minisgl_backend.kernels.cpu.ops import CpuOps
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear.gguf.packed import PACKED
from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels
from minisgl_backend.kernels.moe.mixtures import MixtureKernels
from minisgl_backend.kernels.ops import Ops
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.number_formats import GGUF_BLOCKS, WEIGHT_FORMATS


def select_ops(device: torch.device, hidden_size: int | None, dtype: torch.dtype, is_mixture: bool = False) -> Ops:
    """The best implementation for a device: Triton-language kernels on a GPU, compiled ones for 16 bits on a
    CPU with AVX2, plain torch elsewhere. hidden_size, dtype, is_mixture (of experts): of the model; hidden_size None:
    of none that decodes, so that it has no say in how the process's kernels share a multiprocessor."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from minisgl_backend.kernels.triton_ops import TritonOps

        return TritonOps(device, None if is_mixture else hidden_size)
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        library = cpu_library()
        if library is not None:
            return CpuOps(library)
    return TorchOps()


def block_types(device: torch.device, dtype: torch.dtype, is_mixture: bool = False) -> Mapping[str, float]:
    """The types of GGUF's blocks with which GEMMs there are made, and their memory over that in the file: on a CPU they
    are as they lie there, on a GPU laid out anew. dtype, is_mixture (of experts): of the model."""
    if dtype != torch.bfloat16:
        return {}
    if device.type == "cpu":
        return {} if cpu_library() is None else dict.fromkeys(GGUF_BLOCKS, 1.0)
    if not torch.cuda.is_available():  # a GPU that is asked about by name
        return {}
    facts = DeviceFacts.of(device)
    serves = on_gpu(facts) and facts.capability is not None and facts.capability >= WEIGHT_FORMATS["gguf"].capability
    return PACKED if serves and not is_mixture else {}


class DeviceKernels:
    """GEMMs and mixtures of experts of one device. One object for each model."""

    def __init__(self, gemms: GemmDevice) -> None:
        self.gemms, self.ops = gemms, gemms.ops
        self.on_gpu = gemms.ops.facts is not None and on_gpu(gemms.ops.facts)  # by this project's kernels
        self.plain = PlainKernels(gemms)
        self.mixtures = self._mixtures()

    def _mixtures(self) -> MixtureKernels:
        if not self.on_gpu:
            return MixtureKernels(self.plain)
        from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels

        return TritonMixtureKernels(self.plain)


def select_kernels(ops: Ops, device: torch.device) -> DeviceKernels:
    """The implementations that go with the `Ops` of a device."""
    return DeviceKernels(GemmDevice(ops, device))


def mixture_token_counts(device: torch.device, num_experts: int, experts_per_token: int) -> tuple[int, ...]:
    """Token counts, each the smallest for which a mixture of experts launches kernels that fewer tokens do not need."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return ()
    from minisgl_backend.kernels.moe.grouped import token_counts

    return token_counts(num_experts, experts_per_token)
