"""Which implementation computes with adapters on a device."""

from __future__ import annotations

import importlib.util

import torch

from minisgl_backend.kernels.lora.reference import LoraKernels


def choose_lora(device: torch.device, dtype: torch.dtype) -> LoraKernels:
    """dtype: of the model."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from minisgl_backend.kernels.lora.gpu import TritonLora

        return TritonLora(device, dtype)
    return LoraKernels()
