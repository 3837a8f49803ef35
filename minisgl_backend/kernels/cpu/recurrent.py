"""Layers with states by `recurrent.cpp`: the gated delta rule's window and fold, and the gated short convolution. What
it does not take, as float32 models and sizes that are no multiple of CPU_LANES, torch computes."""

from __future__ import annotations

import ctypes

import torch

from minisgl_backend.kernels.cpu.library import cpu_library
from minisgl_backend.kernels.cpu.ops import HALF, pointer
from minisgl_backend.kernels.linear.choose import CPU_LANES
from minisgl_backend.kernels.recurrent import reference
from minisgl_backend.kernels.recurrent.calls import DeltaLayer, FoldBatch, WindowBatch
from minisgl_backend.kernels.recurrent.short_conv import ShortConvCall, short_conv_in_torch
from minisgl_backend.kv.state import LayerState

_MOST_TAPS = 16  # of a short convolution


class NativeDelta(ctypes.Structure):
    """`Delta` of recurrent.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out", "rows", "lens", "slots", "borders")),
        *((name, ctypes.c_void_p) for name in ("states", "conv", "tail_k", "tail_u", "tail_g", "tail_conv")),
        *((name, ctypes.c_void_p) for name in ("conv_weight", "a_log", "dt_bias", "norm")),
        *((name, ctypes.c_void_p) for name in ("sources", "targets", "ends")),
        *((name, ctypes.c_int64) for name in ("count", "x_stride", "k_heads", "v_heads", "k_dim", "v_dim", "width")),
        *((name, ctypes.c_int64) for name in ("length", "ring", "page_size", "num_layers", "num_slots", "num_rows")),
        *((name, ctypes.c_float) for name in ("eps", "beta_scale")),
    )


class NativeShortConv(ctypes.Structure):
    """`ShortConv` of recurrent.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("bcx", "weight", "bias", "rows", "ends", "page_table", "ring", "out")),
        *((name, ctypes.c_int64) for name in ("tokens", "channels", "width", "length", "page_size", "table_stride")),
    )


def delta_window(
    x: torch.Tensor, layer: DeltaLayer, batch: WindowBatch, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `reference.delta_window`; rows of x may be strided."""
    config, state = layer.config, layer.state
    weights = (layer.conv_weight, layer.a_log, layer.dt_bias, layer.norm_weight)
    if not _is_served(x.dtype, state) or any(weight.dtype != torch.float32 for weight in weights):
        return reference.delta_window(x, layer, batch, out)
    out = x.new_empty(len(x), config.num_v_heads * config.v_dim) if out is None else out
    native = NativeDelta(
        x=x.data_ptr(), out=out.data_ptr(), rows=batch.rows.data_ptr(), lens=batch.kv_lens.data_ptr(),
        slots=batch.state_slot.data_ptr(), borders=batch.state_border.data_ptr(), **_tensors(state),
        conv_weight=weights[0].data_ptr(), a_log=weights[1].data_ptr(), dt_bias=weights[2].data_ptr(),
        norm=weights[3].data_ptr(), count=len(x), x_stride=x.stride(0), width=config.conv_width, **_sizes(state),
        eps=layer.norm_eps, beta_scale=layer.beta_scale,
    )  # fmt: skip
    _library().minisgl_delta_window(HALF[x.dtype], ctypes.byref(native))
    return out


def delta_fold(stack: LayerState, batch: FoldBatch, page_size: int) -> None:
    """As `reference.delta_fold`."""
    if not _is_served(stack.tail_k.dtype, stack):
        return reference.delta_fold(stack, batch, page_size)
    native = NativeDelta(
        rows=batch.rows.data_ptr(), borders=batch.state_border.data_ptr(), sources=batch.sources.data_ptr(),
        targets=batch.targets.data_ptr(), ends=batch.borders.data_ptr(), **_tensors(stack), count=len(batch.rows),
        width=stack.conv.shape[2] + 1, page_size=page_size, num_layers=stack.states.shape[0],
        num_slots=stack.states.shape[1], num_rows=stack.tail_k.shape[1], **_sizes(stack),
    )  # fmt: skip
    _library().minisgl_delta_fold(HALF[stack.tail_k.dtype], ctypes.byref(native))


def short_conv(call: ShortConvCall) -> None:
    """See `short_conv.py`."""
    channels, width = call.weight.shape
    tensors = (call.bcx, call.weight, call.ring, call.out, *([] if call.bias is None else [call.bias]))
    plain = all(tensor.dtype == call.bcx.dtype and tensor.is_contiguous() for tensor in tensors)
    if not plain or call.bcx.dtype not in HALF or channels % CPU_LANES or width > _MOST_TAPS:
        return short_conv_in_torch(call)
    native = NativeShortConv(
        bcx=call.bcx.data_ptr(), weight=call.weight.data_ptr(), bias=pointer(call.bias), rows=call.rows.data_ptr(),
        ends=call.ends.data_ptr(), page_table=call.page_table.data_ptr(), ring=call.ring.data_ptr(),
        out=call.out.data_ptr(), tokens=len(call.rows), channels=channels, width=width, length=call.ring.shape[1],
        page_size=call.page_size, table_stride=call.page_table.stride(0),
    )  # fmt: skip
    _library().minisgl_short_conv(HALF[call.bcx.dtype], ctypes.byref(native))


def _library() -> ctypes.CDLL:
    library = cpu_library()
    assert library is not None, "tables name these functions where there is one"
    return library


def _is_served(dtype: torch.dtype, state: LayerState) -> bool:
    sizes = (state.tail_k.shape[-1], state.tail_u.shape[-1])
    return dtype in HALF and state.states.dtype == torch.float32 and not any(size % CPU_LANES for size in sizes)


def _tensors(state: LayerState) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in state._asdict().items()}


def _sizes(state: LayerState) -> dict[str, int]:
    """Of one layer, or of several alike."""
    return {
        "k_heads": state.tail_k.shape[-3],
        "v_heads": state.tail_u.shape[-3],
        "k_dim": state.tail_k.shape[-1],
        "v_dim": state.tail_u.shape[-1],
        "length": state.tail_u.shape[-2],
        "ring": state.tail_conv.shape[-2],
    }
