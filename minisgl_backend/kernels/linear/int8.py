"""GEMMs with INT8 weights and INT8 activations, by torch alone: cuBLAS' integer GEMM on GPUs, float32 elsewhere.

Weights have a scale for each output, activations one for each token, made when they come (W8A8, as SmoothQuant has it:
Xiao et al., 2023). Not tuned: activations are quantized and results scaled by kernels of their own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.linear.choose import is_int8_aligned
from minisgl_backend.kernels.ops import Ops
from minisgl_backend.kernels.torch_ops import activate_mul

LARGEST = 127.0
LEAST = 1e-10  # of a row's largest number: what is all zero has a scale, too
_LEAST_ROWS = 32  # cuBLAS multiplies no fewer than 17


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_tokens, size] -> int8, and float32 scales [num_tokens]."""
    x32 = x.float()
    scales = x32.abs().amax(-1).clamp_min(LEAST) / LARGEST
    return (x32 / scales.unsqueeze(-1)).round().clamp(-LARGEST, LARGEST).to(torch.int8), scales


def linear(
    ops: Ops,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """As `PlainKernels.linear`: weight int8 [size_out, size_in], scale float32 [size_out]."""
    if norm_weight is not None:
        x = ops.rms_norm(x, norm_weight, eps)
    numbers, x_scale = quantize_tokens(x)
    out = product(numbers, weight).float() * x_scale.unsqueeze(1) * scale
    if bias is not None:
        out += bias.float()
    if activation is not None:
        out = activate_mul(out, activation)
    if residual is not None:
        out += residual.float()
    return out.to(x.dtype)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of integers: exact as int32, and as float32 up to 2**24."""
    rows = len(x)
    if not x.is_cuda or rows == 0 or not is_int8_aligned(*weight.shape):
        return F.linear(x.float(), weight.float())
    padded = F.pad(x, (0, 0, 0, max(0, _LEAST_ROWS - rows)))
    return torch._int_mm(padded, weight.t())[:rows]
