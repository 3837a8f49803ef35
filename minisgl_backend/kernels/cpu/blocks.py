"""GEMMs and look-ups with weights in GGUF's blocks on a CPU, by the compiled kernels.

Activations become int8 by groups of 32, as in llama.cpp. A result does not depend on the rows it is computed with.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.cpu.ops import ACTIVATIONS, CpuOps, multiplied, pointer
from minisgl_backend.kernels.linear.blocks import BlockWeight
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.moe.call import Experts, MixtureCall
from minisgl_backend.kernels.moe.mixtures import MixtureKernels
from minisgl_backend.kernels.torch_ops import activate_mul


def linear(device: GemmDevice, x: torch.Tensor, weight: BlockWeight, call: GemmCall) -> torch.Tensor:
    """See `GemmCall`; x in bfloat16."""
    ops = device.ops
    assert isinstance(ops, CpuOps), "the facts are those of its device"
    x = x.contiguous()
    if call.norm_weight is not None and call.norm_weight.dtype != x.dtype:
        x, call = ops.rms_norm(x, call.norm_weight, call.eps), call._replace(norm_weight=None)
    norm_weight, eps, bias, residual, activation, *_ = call
    if activation is not None and (bias is not None or activation not in ACTIVATIONS):
        return activate_mul(linear(device, x, weight, GemmCall(norm_weight, eps, bias)), activation)
    if residual is not None and not residual.is_contiguous():
        return residual.add_(linear(device, x, weight, call._replace(residual=None)))
    size_out = weight.shape[0]
    outputs = size_out if activation is None else size_out // 2
    return multiplied(ops.library.minisgl_block_linear, x, weight.table, call, outputs)


def mixture(
    kernels: MixtureKernels, x: torch.Tensor, experts: Experts[list[BlockWeight]], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`; x in bfloat16."""
    x, (ids, weights) = kernels.picked(x, experts, call)
    ops = kernels.plain.device.ops
    assert isinstance(ops, CpuOps), "the facts are those of its device"
    residual = None if call.residual is None else call.residual.contiguous()
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.float().contiguous()
    out = torch.empty_like(x)
    ops.library.minisgl_block_mixture(
        x.data_ptr(),
        _tables(experts.gate_up),
        _tables(experts.down),
        ids.data_ptr(),
        weights.data_ptr(),
        pointer(residual),
        ACTIVATIONS[experts.activation],
        experts.num_experts,
        *ids.shape,
        x.shape[1],
        experts.intermediate_size,
        out.data_ptr(),
    )
    return out


def _tables(weights: list[BlockWeight]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(weights))(*(ctypes.addressof(one.table) for one in weights))


def rows_of(device: GemmDevice, weight: BlockWeight, ids: torch.Tensor) -> torch.Tensor:
    """ids int [count], within a weight of one tensor -> [count, inputs] in bfloat16."""
    (piece,) = weight.pieces
    if piece.type is None:
        return F.embedding(ids, piece.data)
    ops = device.ops
    assert isinstance(ops, CpuOps), "the facts are those of its device"
    places = ids.long().contiguous()
    out = torch.empty((len(places), weight.shape[1]), dtype=torch.bfloat16)
    ops.library.minisgl_block_rows(weight.table, places.data_ptr(), len(places), weight.shape[1], out.data_ptr())
    return out
