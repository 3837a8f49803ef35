"""`Ops` and GEMMs on a CPU: the compiled kernels of `kernels.cpp` where they apply, torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from minisgl_backend.kernels.cpu.library import CpuLibrary
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.choose import CPU_LANES
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.linear.plain import reference
from minisgl_backend.kernels.ops import QKNormRope, TokenPlaces
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.kv.layout import ONE, LayerKV

HALF: Mapping[torch.dtype, int] = MappingProxyType({torch.bfloat16: 0, torch.float16: 1})  # as kernels take it
# By their numbers in epilogue.h.
ACTIVATIONS: Mapping[str | None, int] = MappingProxyType({None: 0, "silu": 1, "gelu_tanh": 2, "swiglu_oai": 3})


class CpuOps(TorchOps):
    """See `Ops`. Number formats of more than 16 bits use torch."""

    def __init__(self, library: CpuLibrary) -> None:
        self.library, self.facts = library, DeviceFacts.of(torch.device("cpu"))

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        size, formats = x.shape[-1], _formats(x.dtype, weight)
        if out is not None or formats is None or size % CPU_LANES or not _are_plain(x):
            return super().rms_norm(x, weight, eps, out)
        out = torch.empty_like(x)
        self.library.minisgl_rms_norm(
            formats, x.data_ptr(), weight.data_ptr(), eps, x.numel() // size, size, out.data_ptr()
        )
        return out

    def add_norm(
        self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, multiplier: float = 1.0
    ) -> torch.Tensor:
        size, formats = x.shape[-1], _formats(x.dtype, weight)
        if formats is None or size % CPU_LANES or not _are_plain(hidden, x):
            return super().add_norm(hidden, x, weight, eps, multiplier)
        out = torch.empty_like(x)
        self.library.minisgl_add_norm(
            formats,
            hidden.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            eps,
            multiplier,
            x.numel() // size,
            size,
            out.data_ptr(),
        )
        return out

    def rope_store(
        self, qkv: torch.Tensor, rotation: QKNormRope, at: TokenPlaces, kv: LayerKV, num_q_heads: int
    ) -> torch.Tensor:
        _, num_kv_heads, page_size, head_dim = kv.k.shape
        r, formats = rotation, _formats(qkv.dtype, rotation.q_norm, rotation.k_norm)
        if formats is None or head_dim % CPU_LANES or not _are_plain(qkv, kv.k, kv.v) or kv.scales != ONE:
            return super().rope_store(qkv, rotation, at, kv, num_q_heads)
        positions, slots = at.positions.int().contiguous(), at.slots.int().contiguous()
        self.library.minisgl_rope_store(
            formats,
            qkv.data_ptr(),
            pointer(r.q_norm),
            pointer(r.k_norm),
            r.eps,
            r.cos_sin.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            kv.k.data_ptr(),
            kv.v.data_ptr(),
            len(qkv),
            num_q_heads,
            num_kv_heads,
            head_dim,
            page_size,
        )
        return qkv.view(len(qkv), -1, head_dim)[:, :num_q_heads]


def linear(device: GemmDevice, x: torch.Tensor, weight: torch.Tensor, call: GemmCall) -> torch.Tensor:
    """See `GemmCall`; what is not bfloat16, or not contiguous, is computed by torch."""
    ops = device.ops
    assert isinstance(ops, CpuOps), "the facts are those of its device"
    if call.norm_weight is not None and call.norm_weight.dtype != x.dtype:
        x, call = ops.rms_norm(x, call.norm_weight, call.eps), call._replace(norm_weight=None)
    if x.dtype != torch.bfloat16 or not _are_plain(x, weight, call.norm_weight, call.bias, call.residual):
        return reference.linear(device, x, weight, call)
    outputs = len(weight) // 2 if call.activation else len(weight)
    return multiplied(ops.library.minisgl_linear, x, weight.data_ptr(), call, outputs)


def multiplied(
    multiply: Callable[..., object], x: torch.Tensor, weight: object, call: GemmCall, outputs: int
) -> torch.Tensor:
    """A GEMM of the library by its C function, which takes these arguments: [rows, outputs]."""
    rows, size = x.shape
    out = torch.empty((rows, outputs), dtype=x.dtype)
    multiply(
        x.data_ptr(),
        weight,
        pointer(call.norm_weight),
        call.eps,
        pointer(call.bias),
        pointer(call.residual),
        ACTIVATIONS[call.activation],
        rows,
        size,
        outputs,
        out.data_ptr(),
    )
    return out


def _formats(dtype: torch.dtype, *norms: torch.Tensor | None) -> int | None:
    """`formats` in layers.cpp, of numbers in this dtype and weights of norms; None: its functions do not take them."""
    found = {norm.dtype for norm in norms if norm is not None}
    if dtype not in HALF or len(found) > 1 or not found <= {dtype, torch.float32}:
        return None
    if not all(norm is None or norm.is_contiguous() for norm in norms):
        return None
    return HALF[dtype] + (2 if torch.float32 in found else 0)


def _are_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether they are contiguous and in the same 16 bits; the first is there."""
    dtype = tensors[0].dtype  # type: ignore[union-attr]  # the first is there
    return dtype in HALF and all(one is None or (one.dtype == dtype and one.is_contiguous()) for one in tensors)


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
