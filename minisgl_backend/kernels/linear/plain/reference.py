"""`PlainKernels` in plain torch, for any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.linear.call import BARE, GemmCall
from minisgl_backend.kernels.linear.plain.contract import PlainKernels
from minisgl_backend.kernels.torch_ops import activate_mul


class TorchPlainKernels(PlainKernels):
    """See `PlainKernels`."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, call: GemmCall = BARE) -> torch.Tensor:
        norm_weight, eps, bias, residual, activation = call
        if norm_weight is not None:
            x = self.ops.rms_norm(x, norm_weight, eps)
        if residual is None:
            out = F.linear(x, weight, bias)
            return out if activation is None else activate_mul(out, activation)
        out = torch.addmm(residual, x, weight.t())
        return out if bias is None else out + bias
