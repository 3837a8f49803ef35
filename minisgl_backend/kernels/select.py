"""Selects the implementation of `Ops` and of `PlainKernels` for a device."""

from __future__ import annotations

import importlib.util

import torch

from minisgl_backend.kernels.cpu.library import cpu_library
from minisgl_backend.kernels.cpu.ops import CpuOps, CpuPlainKernels
from minisgl_backend.kernels.ops import Ops
from minisgl_backend.kernels.plain import PlainKernels
from minisgl_backend.kernels.torch_ops import TorchOps, TorchPlainKernels


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


def select_plain_kernels(ops: Ops, device: torch.device) -> PlainKernels:
    """The implementation that goes with the `Ops` of a device."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from minisgl_backend.kernels.triton_ops import TritonOps, TritonPlainKernels

        if isinstance(ops, TritonOps):
            return TritonPlainKernels(ops, device)
    if isinstance(ops, CpuOps):
        return CpuPlainKernels(ops)
    return TorchPlainKernels(ops)


def mixture_token_counts(device: torch.device, num_experts: int, experts_per_token: int) -> tuple[int, ...]:
    """Token counts, each the smallest for which a mixture of experts launches kernels that fewer tokens do not need."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return ()
    from minisgl_backend.kernels.moe.grouped import token_counts

    return token_counts(num_experts, experts_per_token)
