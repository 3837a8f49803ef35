"""GEMMs with weights in GGUF's blocks in torch: each becomes plain numbers first, by the package gguf."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.linear.blocks import BlockWeight
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.linear.plain import reference


def linear(device: GemmDevice, x: torch.Tensor, weight: BlockWeight, call: GemmCall) -> torch.Tensor:
    """See `GemmCall`."""
    return reference.linear(device, x, numbers_of(weight).to(x), call)


def numbers_of(weight: BlockWeight) -> torch.Tensor:
    """[outputs, inputs], on the CPU: float32, or as plain ones are."""
    from gguf import GGMLQuantizationType, dequantize

    rows = [
        one.data
        if one.type is None
        else torch.from_numpy(dequantize(one.data.cpu().contiguous().numpy(), GGMLQuantizationType(one.type)))
        for one in weight.pieces
    ]
    return torch.cat([one.float() for one in rows])
