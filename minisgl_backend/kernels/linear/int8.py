"""GEMMs with INT8 weights and INT8 activations: cuBLAS' integer GEMM by torch, or sgl-kernel's, on GPUs; float32
elsewhere.

Weights have a scale for each output, activations a dynamic one for each token (W8A8, as in SmoothQuant: Xiao et al.,
2023). Activations are quantized by torch, which is not tuned.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.linear.call import GemmCall, WeightKind
from minisgl_backend.kernels.linear.choose import is_int8_aligned
from minisgl_backend.kernels.linear.fp8.reference import epilogue_in_float32
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.linear.libraries import sgl
from minisgl_backend.kernels.torch_ops import activate_mul

LARGEST = 127.0
LEAST = 1e-10  # lower bound of a row's largest number, so that a row of zeros has a scale, too
_LEAST_ROWS = 32  # cuBLAS' integer GEMM needs at least 17


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_tokens, size] -> int8, and float32 scales [num_tokens]."""
    x32 = x.float()
    scales = x32.abs().amax(-1).clamp_min(LEAST) / LARGEST
    return (x32 / scales.unsqueeze(-1)).round().clamp(-LARGEST, LARGEST).to(torch.int8), scales


@dataclass(frozen=True)
class Int8Weight:
    numbers: torch.Tensor  # int8 [size_out, size_in]
    scale: torch.Tensor  # float32 [size_out]
    kind: WeightKind = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", WeightKind.of(self.numbers))


def linear(device: GemmDevice, x: torch.Tensor, weight: Int8Weight, call: GemmCall) -> torch.Tensor:
    """See `GemmCall`."""
    norm_weight, eps, bias, residual, activation, *_ = call
    if norm_weight is not None:
        x = device.ops.rms_norm(x, norm_weight, eps)
    numbers, x_scale = quantize_tokens(x)
    out = int_gemm(numbers, weight.numbers).float() * x_scale.unsqueeze(1) * weight.scale
    return epilogue_in_float32(out, bias, residual, activation).to(x.dtype)


def sgl_linear(device: GemmDevice, x: torch.Tensor, weight: Int8Weight, call: GemmCall) -> torch.Tensor:
    """`linear` by sgl-kernel."""
    norm_weight, eps, bias, residual, activation, *_ = call
    if norm_weight is not None:
        x = device.ops.rms_norm(x, norm_weight, eps)
    numbers, x_scale = quantize_tokens(x)
    out = sgl.scaled_mm("int8_scaled_mm", numbers, x_scale, weight, x.dtype, bias)
    out = out if activation is None else activate_mul(out, activation)
    return out if residual is None else residual.add_(out)


def int_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T of integers: exact in int32, and in float32 up to 2**24."""
    rows = len(x)
    if not x.is_cuda or rows == 0 or not is_int8_aligned(*weight.shape):
        return F.linear(x.float(), weight.float())
    padded = F.pad(x, (0, 0, 0, max(0, _LEAST_ROWS - rows)))
    return torch._int_mm(padded, weight.t())[:rows]
