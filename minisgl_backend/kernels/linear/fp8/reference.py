"""FP8 weights in plain torch: what CPUs run, and what the kernels for GPUs are tested against.

Numbers are e4m3 without infinities (Micikevicius et al., 2022). Weights have a scale for each output, activations a
dynamic one for each token, or a static one from the checkpoint. Or weights have one for each block of outputs and
inputs, and activations one for each token and block of inputs (DeepSeek-V3 technical report, 2024, section 3.3). The
product of two FP8 numbers is exact in float32, in which they are summed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.linear.call import GemmCall, WeightKind
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.torch_ops import activate_mul

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of the format
LEAST = 1e-10  # lower bound of a row's largest number, so that a row of zeros has a scale, too
_ROWS_AT_ONCE = 4096  # rows of a weight quantized at a time: all of it in float32 would take four times its memory


def quantize_outputs(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [..., outputs, inputs] -> FP8 of the same shape, and float32 scales [..., outputs]."""
    rows = weight.reshape(-1, weight.shape[-1])
    numbers = torch.empty(rows.shape, dtype=FP8, device=weight.device)
    scales = torch.empty(len(rows), dtype=torch.float32, device=weight.device)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        scaled, scales[part] = _scaled(rows[part])
        numbers[part].copy_(scaled)
    return numbers.view(weight.shape), scales.view(weight.shape[:-1])


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_tokens, size] -> FP8 numbers as float32, and float32 scales [num_tokens]."""
    scaled, scales = _scaled(x)
    return scaled.to(FP8).float(), scales


def quantize_groups(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_tokens, inputs] -> FP8 numbers as float32, and float32 scales [num_tokens, groups] of `size` inputs each,
    the last of which may have fewer."""
    padded = F.pad(x.float(), (0, -x.shape[1] % size)).unflatten(1, (-1, size))
    scaled, scales = _scaled(padded)
    return scaled.to(FP8).float().flatten(1)[:, : x.shape[1]], scales


def dequantize(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None = None) -> torch.Tensor:
    """weight FP8 [..., outputs, inputs] in float32. scale: [..., outputs], or one a `block` of outputs and inputs."""
    if block is None:
        return weight.float() * scale.unsqueeze(-1)
    outputs, inputs = weight.shape[-2:]
    scale = scale.repeat_interleave(block[0], -2)[..., :outputs, :]
    return weight.float() * scale.repeat_interleave(block[1], -1)[..., :inputs]


def _scaled(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows32 = rows.float()
    scales = rows32.abs().amax(-1).clamp_min(LEAST) / LARGEST
    return (rows32 / scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST), scales


@dataclass(frozen=True)
class Fp8Weight:
    """A weight, and how activations are quantized for it."""

    numbers: torch.Tensor  # FP8 [size_out, size_in]
    scale: torch.Tensor  # float32 [size_out], or [blocks of outputs, blocks of inputs]
    x_scale: torch.Tensor | None = None  # one float32 number for all activations; None: one per token
    # Outputs and inputs that share a scale; activations then have one for each token and block of inputs.
    block: tuple[int, int] | None = None
    kind: WeightKind = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", WeightKind.of(self.numbers, self.block))

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape


def linear(device: GemmDevice, x: torch.Tensor, weight: Fp8Weight, call: GemmCall) -> torch.Tensor:
    """See `GemmCall`."""
    norm_weight, eps, bias, residual, activation, *_ = call
    if norm_weight is not None:
        x = device.ops.rms_norm(x, norm_weight, eps)
    return epilogue_in_float32(quantized_gemm(x, weight), bias, residual, activation).to(x.dtype)


def epilogue_in_float32(
    out: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Of a GEMM's result in float32, which may be overwritten."""
    if bias is not None:
        out += bias.float()
    if activation is not None:
        out = activate_mul(out, activation)
    if residual is not None:
        out += residual.float()
    return out


def quantized_gemm(x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """Quantizes x [num_tokens, size_in], and multiplies it by the weight: float32 [num_tokens, size_out]."""
    numbers, scale, x_scale, block = weight.numbers, weight.scale, weight.x_scale, weight.block
    if block is not None:
        tokens, scales = quantize_groups(x, block[1])
        scales = scales.repeat_interleave(block[1], 1)[:, : x.shape[1]]
        return F.linear(tokens * scales, dequantize(numbers, scale, block))
    if x_scale is not None:
        tokens = (x.float() / x_scale).clamp(-LARGEST, LARGEST).to(FP8).float()
        return F.linear(tokens, numbers.float()) * x_scale * scale
    tokens, scales = quantize_tokens(x)
    return F.linear(tokens, numbers.float()) * scales.unsqueeze(1) * scale
