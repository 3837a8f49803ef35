"""GEMMs of the format `plain` in torch, for any device: the reference that other kernels are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.torch_ops import activate_mul


def linear(device: GemmDevice, x: torch.Tensor, weight: torch.Tensor, call: GemmCall) -> torch.Tensor:
    """See `GemmCall`."""
    norm_weight, eps, bias, residual, activation, *_ = call
    if norm_weight is not None:
        x = device.ops.rms_norm(x, norm_weight, eps)
    if residual is None:
        out = F.linear(x, weight, bias)
        return out if activation is None else activate_mul(out, activation)
    out = torch.addmm(residual, x, weight.t())
    return out if bias is None else out + bias
