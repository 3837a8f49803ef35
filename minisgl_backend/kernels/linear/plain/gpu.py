"""GEMMs of the format `plain` by cuBLAS on a GPU, with this project's kernels around them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.elementwise import activate_mul
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import GemmDevice


def cublaslt(device: GemmDevice, x: torch.Tensor, weight: torch.Tensor, call: GemmCall) -> torch.Tensor:
    """By the algorithm that was measured fastest at start; without a bias."""
    norm_weight, eps, _, residual, activation, out, _ = call
    if out is not None:
        return out if device.tuned.linear_into(x, weight, out) else cublas(device, x, weight, call)
    if norm_weight is not None:
        x, call = device.ops.rms_norm(x, norm_weight, eps), call._replace(norm_weight=None)
    found = device.tuned.linear(x, weight, residual)
    if found is None:
        return cublas(device, x, weight, call)
    return found if activation is None else activate_mul(found, activation, device.pdl(x))


def cublas(device: GemmDevice, x: torch.Tensor, weight: torch.Tensor, call: GemmCall) -> torch.Tensor:
    """By the algorithm that torch takes."""
    norm_weight, eps, bias, residual, activation, out, _ = call
    if out is not None:
        return torch.mm(x, weight.t(), out=out)
    if norm_weight is not None:
        x = device.ops.rms_norm(x, norm_weight, eps)
    if residual is not None:
        # In place: otherwise torch would copy the residual first, with one more kernel.
        found = residual.addmm_(x, weight.t())
        return found if bias is None else found.add_(bias)
    found = F.linear(x, weight, bias)
    return found if activation is None else activate_mul(found, activation, device.pdl(x))
