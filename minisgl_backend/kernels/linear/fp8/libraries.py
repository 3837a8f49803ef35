"""GEMMs of many rows with FP8 weights by torch and by sgl-kernel; x is quantized before, the epilogue comes after."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.epilogue import apply_epilogue
from minisgl_backend.kernels.linear.fp8.quantize import quantize_for
from minisgl_backend.kernels.linear.fp8.reference import FP8, Fp8Weight
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.linear.libraries import sgl

# Rows of x in blocks are padded to a multiple of this: some other numbers cuBLAS refuses, and CUTLASS copies x for.
ROWS_MULTIPLE = 16
_BLOCKS_ALIGNMENT = 4  # torch needs rows of a weight's scales to be a multiple of this many blocks


def scaled_mm(device: GemmDevice, x: torch.Tensor, weight: Fp8Weight, call: GemmCall) -> torch.Tensor:
    numbers, scales = quantize_for(weight, x, call)
    return apply_epilogue(device, torch_scaled_mm(numbers, scales, weight, x.dtype), call)


def scaled_mm_blocks(device: GemmDevice, x: torch.Tensor, weight: Fp8Weight, call: GemmCall) -> torch.Tensor:
    numbers, scales = quantize_for(weight, x, call, ROWS_MULTIPLE)
    return apply_epilogue(device, torch_scaled_mm(numbers, scales, weight, x.dtype)[: len(x)], call)


def torch_scaled_mm(x: torch.Tensor, x_scale: torch.Tensor, weight: Fp8Weight, dtype: torch.dtype) -> torch.Tensor:
    """torch's, of rows as `quantize_for` gives them; in blocks always in bfloat16."""
    if weight.block is not None:
        return torch_blocks(x, x_scale, weight.numbers, weight.scale)
    return torch._scaled_mm(
        x, weight.numbers.t(), scale_a=x_scale.unsqueeze(1), scale_b=weight.scale.unsqueeze(0), out_dtype=dtype
    )


def sgl_scaled_mm(device: GemmDevice, x: torch.Tensor, weight: Fp8Weight, call: GemmCall) -> torch.Tensor:
    numbers, scales = quantize_for(weight, x, call)
    out = sgl.scaled_mm("fp8_scaled_mm", numbers, scales, weight, x.dtype, call.bias)
    return apply_epilogue(device, out, call._replace(bias=None))


def sgl_scaled_mm_blocks(device: GemmDevice, x: torch.Tensor, weight: Fp8Weight, call: GemmCall) -> torch.Tensor:
    numbers, scales = quantize_for(weight, x, call, ROWS_MULTIPLE)
    out = sgl.fp8_blockwise_scaled_mm(numbers, scales, weight.numbers, weight.scale, x.dtype)
    return apply_epilogue(device, out[: len(x)], call)


def torch_blocks(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """torch's block-scaled FP8 GEMM (weights in blocks of 128 x 128, x in groups of 128), result in bfloat16: cuBLAS
    12.9 or later on Hopper. Both sizes of the weight are whole blocks; x_scale's columns are contiguous."""
    from torch.nn.functional import ScalingType, scaled_mm  # since torch 2.10

    if missing := -scale.shape[1] % _BLOCKS_ALIGNMENT:  # in few models; F.pad copies even where nothing is missing
        scale = F.pad(scale, (0, missing))
    out: torch.Tensor = scaled_mm(
        x, weight.t(), x_scale, ScalingType.BlockWise1x128, scale.t(), ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip
    return out


@cache
def torch_has_blocks(device: torch.device) -> bool:
    """Whether torch and its cuBLAS have the block-scaled GEMM on this GPU: tries a small one."""
    one = torch.ones((128, 512), device=device).to(FP8)
    try:
        found = torch_blocks(
            one, torch.ones((4, 128), device=device).t(), one, torch.ones((1, 4), device=device)
        )  # fmt: skip
        return bool((found == 512).all())
    except (ImportError, RuntimeError, ValueError):
        return False
