"""Which implementation adds adapters' outputs on a device."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch

from minisgl_backend.kernels import torch_ops
from minisgl_backend.kernels.lora.reference import LoraAdd, add_lora


class LoraKernels(NamedTuple):
    add: LoraAdd
    activate_mul: Callable[[torch.Tensor, str], torch.Tensor]  # of gate and up, which adapters change before it
    rank_multiple: int  # of the ranks that its factors are filled up to
    dtype: torch.dtype  # of factors
    row_counts: tuple[int, ...] = ()  # each the smallest for which it launches kernels that fewer rows do not need


def choose_lora(device: torch.device, dtype: torch.dtype) -> LoraKernels:
    """dtype: of the model."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from minisgl_backend.kernels.elementwise import activate_mul
        from minisgl_backend.kernels.lora.gpu import MANY_ROWS, RANK_MULTIPLE, add_lora_gpu

        return LoraKernels(add_lora_gpu, activate_mul, RANK_MULTIPLE, dtype, (1, MANY_ROWS))
    return LoraKernels(
        add_lora, torch_ops.activate_mul, 1, torch.float32
    )  # in which torch's products of single rows are fast on a CPU
