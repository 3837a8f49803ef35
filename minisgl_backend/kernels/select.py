"""Selects the implementations of `Ops`, of `PlainKernels` and of `MixtureKernels` for a device."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch

from minisgl_backend.kernels.cpu.library import cpu_library
from minisgl_backend.kernels.cpu.ops import CpuOps, CpuPlainKernels
from minisgl_backend.kernels.linear.plain.contract import PlainKernels
from minisgl_backend.kernels.linear.plain.reference import TorchPlainKernels
from minisgl_backend.kernels.moe.contract import MixtureKernels
from minisgl_backend.kernels.moe.reference import TorchMixtureKernels
from minisgl_backend.kernels.ops import Ops
from minisgl_backend.kernels.torch_ops import TorchOps


def select_ops(device: torch.device, hidden_size: int, dtype: torch.dtype, is_mixture: bool = False) -> Ops:
    """The best implementation for a device: Triton-language kernels on a GPU, compiled ones for bfloat16 on a
    CPU with AVX-512 BF16, plain torch elsewhere. hidden_size, dtype, is_mixture (of experts): of the model."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from minisgl_backend.kernels.triton_ops import TritonOps

        return TritonOps(device, None if is_mixture else hidden_size)
    if device.type == "cpu" and dtype == torch.bfloat16:
        library = cpu_library()
        if library is not None:
            return CpuOps(library)
    return TorchOps()


class DeviceKernels(NamedTuple):
    """GEMMs and mixtures of experts of one device. One object for each model."""

    plain: PlainKernels
    mixtures: MixtureKernels

    @property
    def ops(self) -> Ops:
        return self.plain.ops


def select_kernels(ops: Ops, device: torch.device) -> DeviceKernels:
    """The implementations that go with the `Ops` of a device."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from minisgl_backend.kernels.linear.plain.gpu import TritonPlainKernels
        from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels
        from minisgl_backend.kernels.triton_ops import TritonOps

        if isinstance(ops, TritonOps):
            on_gpu = TritonPlainKernels(ops, device)
            return DeviceKernels(on_gpu, TritonMixtureKernels(on_gpu))
    plain = CpuPlainKernels(ops) if isinstance(ops, CpuOps) else TorchPlainKernels(ops)
    return DeviceKernels(plain, TorchMixtureKernels(plain))


def mixture_token_counts(device: torch.device, num_experts: int, experts_per_token: int) -> tuple[int, ...]:
    """Token counts, each the smallest for which a mixture of experts launches kernels that fewer tokens do not need."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return ()
    from minisgl_backend.kernels.moe.grouped import token_counts

    return token_counts(num_experts, experts_per_token)
