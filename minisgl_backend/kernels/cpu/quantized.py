"""GEMMs and mixtures of experts by `quantized.cpp`: weights of quantized checkpoints, and of 16 bits, as they lie.

Up to CPU_ROWS rows are multiplied as they come. With more, panels of the weight become float32 (bfloat16 where the
processor multiplies it), and torch's GEMM takes them: it takes a hundred times as long as widening does.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.cpu.native import NativeMixture, NativeWeight, native_weight
from minisgl_backend.kernels.cpu.ops import ACTIVATIONS, HALF, CpuOps, pointer
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.choose import CPU_ROWS
from minisgl_backend.kernels.linear.fp8 import reference as fp8
from minisgl_backend.kernels.linear.fp8.reference import Fp8Weight
from minisgl_backend.kernels.linear.int4.reference import Int4Weight
from minisgl_backend.kernels.linear.int8 import Int8Weight
from minisgl_backend.kernels.linear.int8 import quantize_tokens as quantize_to_int8
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.moe.call import Experts, MixtureCall
from minisgl_backend.kernels.moe.mixtures import MixtureKernels
from minisgl_backend.kernels.moe.mxfp4.weight import Mxfp4Weight

_PANEL_BYTES = 2 << 20  # of float32: smaller ones would be too small for torch's GEMM

CpuWeight = torch.Tensor | Fp8Weight | Int8Weight | Int4Weight


def linear(device: GemmDevice, x: torch.Tensor, weight: CpuWeight, call: GemmCall) -> torch.Tensor:
    """See `GemmCall`: x is bfloat16 or float16, and so is all else but the weight."""
    ops = _ops(device)
    if call.norm_weight is not None and call.norm_weight.dtype != x.dtype:
        x, call = ops.rms_norm(x, call.norm_weight, call.eps), call._replace(norm_weight=None)
    if call.residual is not None and not call.residual.is_contiguous():
        return call.residual.add_(linear(device, x, weight, call._replace(residual=None)))
    x, native = x.contiguous(), native_weight(weight)
    if len(x) > CPU_ROWS:
        if call.norm_weight is not None:
            x = ops.rms_norm(x, call.norm_weight, call.eps)
        return _by_panels(device, _as_quantized(x, weight), weight, native, call)
    norm_weight, eps, bias, residual, activation, *_ = call
    outputs = native.rows // 2 if activation else native.rows
    out = x.new_empty((len(x), outputs))
    ops.library.minisgl_quantized_linear(
        HALF[x.dtype],
        x.data_ptr(),
        ctypes.byref(native),
        pointer(norm_weight),
        eps,
        pointer(bias),
        pointer(residual),
        ACTIVATIONS[activation],
        len(x),
        outputs,
        out.data_ptr(),
    )
    return out


def _as_quantized(x: torch.Tensor, weight: CpuWeight) -> torch.Tensor:
    """What is left of x once it was in the weight's number format."""
    if isinstance(weight, Int8Weight):
        numbers, scales = quantize_to_int8(x)
        return (numbers.float() * scales.unsqueeze(1)).to(x.dtype)
    if not isinstance(weight, Fp8Weight):
        return x
    if weight.block is not None:
        tokens, scales = fp8.quantize_groups(x, weight.block[1])
        return (tokens * scales.repeat_interleave(weight.block[1], 1)[:, : x.shape[1]]).to(x.dtype)
    if weight.x_scale is not None:
        scaled = (x.float() / weight.x_scale).clamp(-fp8.LARGEST, fp8.LARGEST)
        return (scaled.to(fp8.FP8).float() * weight.x_scale).to(x.dtype)
    tokens, scales = fp8.quantize_tokens(x)
    return (tokens * scales.unsqueeze(1)).to(x.dtype)


def _by_panels(
    device: GemmDevice, x: torch.Tensor, weight: CpuWeight, native: NativeWeight, call: GemmCall
) -> torch.Tensor:
    library, size = _ops(device).library, native.size
    dtype = x.dtype if device.facts.bfloat16_units and x.dtype == torch.bfloat16 else torch.float32
    inputs, outputs = x.to(dtype), native.rows // 2 if call.activation else native.rows
    width = min(outputs, max(64, _PANEL_BYTES // (8 if call.activation else 4) // size))
    panel = torch.empty((2 * width if call.activation else width, size), dtype=dtype)
    out = x.new_empty((len(x), outputs))

    def widen(begin: int, target: torch.Tensor) -> None:
        if isinstance(weight, torch.Tensor):
            target.copy_(weight[begin : begin + len(target)])
            return
        wide = target if dtype == torch.float32 else torch.empty(target.shape, dtype=torch.float32)
        library.minisgl_widen(ctypes.byref(native), begin, begin + len(target), wide.data_ptr())
        if wide is not target:
            target.copy_(wide)

    for begin in range(0, outputs, width):
        count = min(width, outputs - begin)
        widen(begin, panel[:count])
        if call.activation:
            widen(outputs + begin, panel[count : 2 * count])
        sums = F.linear(inputs, panel[: 2 * count if call.activation else count]).float()
        library.minisgl_finish(
            HALF[x.dtype],
            sums.data_ptr(),
            sums.shape[1],
            count,
            pointer(call.bias),
            pointer(call.residual),
            ACTIVATIONS[call.activation],
            len(x),
            outputs,
            begin,
            begin + count,
            out.data_ptr(),
        )
    return out


def mixture(
    kernels: MixtureKernels, x: torch.Tensor, experts: Experts[CpuWeight | Mxfp4Weight], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`."""
    x, (ids, weights) = kernels.picked(x, experts, call)
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.float().contiguous()
    out = torch.empty_like(x)
    gate_up, down = native_weight(experts.gate_up), native_weight(experts.down)
    native = NativeMixture(
        gate_up=ctypes.pointer(gate_up),
        down=ctypes.pointer(down),
        gate_up_bias=pointer(experts.gate_up_bias),
        down_bias=pointer(experts.down_bias),
        ids=ids.data_ptr(),
        weights=weights.data_ptr(),
        residual=pointer(call.residual),
        experts=experts.num_experts,
        tokens=len(x),
        picked=ids.shape[1],
        inner=down.size,
        activation=ACTIVATIONS[experts.activation],
        turns=isinstance(experts.gate_up, Mxfp4Weight),
    )
    _ops(kernels.plain.device).library.minisgl_mixture(
        HALF[x.dtype], x.data_ptr(), ctypes.byref(native), out.data_ptr()
    )
    return out


def _ops(device: GemmDevice) -> CpuOps:
    assert isinstance(device.ops, CpuOps), "the facts are those of its device"
    return device.ops
