"""GEMMs with INT8 weights and INT8 activations: cuBLAS' integer GEMM by torch, or sgl-kernel's, on GPUs; float32
elsewhere.

Weights have a scale for each output, activations a dynamic one for each token (W8A8, as in SmoothQuant: Xiao et al.,
2023). Activations are quantized by torch, which is not tuned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear import sgl
from minisgl_backend.kernels.linear.call import BARE, GemmCall
from minisgl_backend.kernels.linear.choose import LinearKey, is_int8_aligned, linear_chooser
from minisgl_backend.kernels.linear.plain.contract import PlainKernels
from minisgl_backend.kernels.torch_ops import activate_mul

LARGEST = 127.0
LEAST = 1e-10  # lower bound of a row's largest number, so that a row of zeros has a scale, too
_LEAST_ROWS = 32  # cuBLAS' integer GEMM needs at least 17


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_tokens, size] -> int8, and float32 scales [num_tokens]."""
    x32 = x.float()
    scales = x32.abs().amax(-1).clamp_min(LEAST) / LARGEST
    return (x32 / scales.unsqueeze(-1)).round().clamp(-LARGEST, LARGEST).to(torch.int8), scales


class Int8Weight(NamedTuple):
    numbers: torch.Tensor  # int8 [size_out, size_in]
    scale: torch.Tensor  # float32 [size_out]


class Int8Kernels:
    """GEMMs with INT8 weights. One object per model, shared by all its INT8 weights."""

    def __init__(self, plain: PlainKernels, device: torch.device) -> None:
        """plain: of the same device."""
        self.ops, self._tuner = plain.ops, plain.kernel_tuner
        self._chooser = linear_chooser("int8", DeviceFacts.of(device))

    def linear(self, x: torch.Tensor, weight: Int8Weight, call: GemmCall = BARE) -> torch.Tensor:
        return self.multiply(self._chooser.kernel(LinearKey.of(x, len(weight.numbers), call)), x, weight, call)

    def multiply(self, kernel: str, x: torch.Tensor, weight: Int8Weight, call: GemmCall) -> torch.Tensor:
        """See `measured.Multiply`."""
        norm_weight, eps, bias, residual, activation = call
        if norm_weight is not None:
            x = self.ops.rms_norm(x, norm_weight, eps)
        numbers, x_scale = quantize_tokens(x)
        if kernel == "sgl_int8":
            out = sgl.int8_scaled_mm(numbers, x_scale, weight.numbers, weight.scale, x.dtype, bias)
            out = out if activation is None else activate_mul(out, activation)
            return out if residual is None else residual.add_(out)
        out = int_gemm(numbers, weight.numbers).float() * x_scale.unsqueeze(1) * weight.scale
        if bias is not None:
            out += bias.float()
        if activation is not None:
            out = activate_mul(out, activation)
        if residual is not None:
            out += residual.float()
        return out.to(x.dtype)

    def prepare_linear(self, weights: Sequence[Int8Weight], rows: Sequence[int], longest: int) -> None:
        """As `PlainKernels.prepare_linear`."""
        numbers = weights[0].numbers
        if self._tuner is not None:
            shape = (numbers.shape[0], numbers.shape[1])
            self._tuner.tune(self._chooser, self.multiply, weights, numbers.nbytes, shape, rows, longest)


def int_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T of integers: exact in int32, and in float32 up to 2**24."""
    rows = len(x)
    if not x.is_cuda or rows == 0 or not is_int8_aligned(*weight.shape):
        return F.linear(x.float(), weight.float())
    padded = F.pad(x, (0, 0, 0, max(0, _LEAST_ROWS - rows)))
    return torch._int_mm(padded, weight.t())[:rows]
