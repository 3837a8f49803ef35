"""`Int4Kernels` on a GPU: which rows take which way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels import elementwise
from minisgl_backend.kernels.linear import int4
from minisgl_backend.kernels.linear.choose import LinearKey, linear_chooser
from minisgl_backend.kernels.linear.int4_planes import packed_scale, packed_zero, planes
from minisgl_backend.kernels.linear.int4_torch import MIDDLE, PLANES, Int4Kernels, Int4Weight
from minisgl_backend.kernels.triton_ops import TritonPlainKernels

SCRATCH_BYTES = 32 << 20  # of a dequantized part of a weight: the L2 cache of an H100 has 50 MB
_TILE_OUT = 32


class TritonInt4Kernels(Int4Kernels):
    """The contracts are those of `Int4Kernels`. Nothing synchronises with the device."""

    def __init__(self, plain: TritonPlainKernels, device: torch.device) -> None:
        """plain: of the same device, whose workspace is used: the kernels follow one another."""
        super().__init__(plain.ops)
        self._plain = plain
        facts = plain.ops.facts
        self._num_sms = facts.multiprocessors
        self._kernel = linear_chooser("int4", facts).kernel
        self._scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)

    def linear(
        self,
        x: torch.Tensor,
        weight: Int4Weight,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        if norm_weight is not None:
            x = self.ops.rms_norm(x, norm_weight, eps)
        pdl = self._plain.ops.pdl(x)
        key = LinearKey(
            len(x), weight.size_out, weight.size_in, x.dtype, norm_weight is not None, bias is not None,
            residual is not None, activation,
        )  # fmt: skip
        if len(x) > 0 and self._kernel(key) == "int4_few_rows":
            return int4.linear(
                x, weight, self._plain.workspace, bias=bias, residual=residual, activation=activation,
                num_sms=self._num_sms, pdl=pdl,
            )  # fmt: skip
        out = torch.empty((len(x), weight.size_out), dtype=x.dtype, device=x.device)
        step = max(_TILE_OUT, len(self._scratch) // (x.element_size() * weight.size_in) // _TILE_OUT * _TILE_OUT)
        for start in range(0, weight.size_out, step):
            rows = slice(start, min(start + step, weight.size_out))
            part = dequantize_rows(weight, rows, x.dtype, self._scratch)
            torch.mm(x, part.t(), out=out[:, rows])
        if bias is not None:
            out += bias
        if activation is not None:
            return elementwise.activate_mul(out, activation, pdl)
        return out if residual is None else residual.add_(out)

    def moe(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up: Int4Weight,
        down: Int4Weight,
        residual: torch.Tensor | None = None,
        activation: str = "silu",
    ) -> torch.Tensor:
        from minisgl_backend.kernels.moe.int4 import moe  # which needs the module above

        return moe(x, expert_ids, expert_weights, gate_up, down, residual, activation, pdl=self._plain.moe_pdl(x))


def dequantize_rows(weight: Int4Weight, rows: slice, dtype: torch.dtype, scratch: torch.Tensor) -> torch.Tensor:
    """[outputs of `rows`, size_in], which lies in scratch (uint8) where that has room."""
    count, block = rows.stop - rows.start, PLANES * weight.plane
    size = count * weight.size_in * dtype.itemsize
    if size <= len(scratch):
        out = scratch[:size].view(dtype).view(count, weight.size_in)
    else:
        out = torch.empty((count, weight.size_in), dtype=dtype, device=scratch.device)
    _dequantize_kernel[(weight.padded // block, triton.cdiv(count, _TILE_OUT))](
        weight.words, weight.scales, weight.words if weight.zeros is None else weight.zeros, out, rows.start, rows.stop,
        WIDTH=weight.size_out, SIZE_IN=weight.size_in, WORDS=weight.words.shape[-1], GROUP=weight.group,
        PLANE=weight.plane, TOGETHER=int4.planes_together(weight), TILE_OUT=_TILE_OUT, ZEROS=weight.zeros is not None,
        MIDDLE=MIDDLE, ASM=int4.uses_assembly(out), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["start", "stop"])
def _dequantize_kernel(
    words_ptr, scales_ptr, zeros_ptr, out_ptr, start, stop,
    WIDTH: tl.constexpr, SIZE_IN: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, PLANE: tl.constexpr,
    TOGETHER: tl.constexpr, TILE_OUT: tl.constexpr, ZEROS: tl.constexpr, MIDDLE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Outputs from `start` to `stop`, one block of inputs a program."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = start + tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
    ok = row < stop
    first = tl.program_id(0) * (8 * PLANE)
    c = tl.arange(0, PLANE)
    words, odd = int4.words_of(
        words_ptr + row.to(tl.int64)[:, None] * WORDS, c[None, :], ok[:, None], first, PLANE, ASM
    )
    scales = int4.scales_of(scales_ptr, zeros_ptr, row, ok, first, WIDTH, GROUP, PLANE, TOGETHER, ZEROS)
    c_tile = tl.broadcast_to(c[None, :], words.shape)
    out_rows = out_ptr + (row - start).to(tl.int64)[:, None] * SIZE_IN
    for chunk in tl.static_range(8 // TOGETHER):
        scale = tl.broadcast_to(packed_scale(scales[chunk][0], ASM)[:, None], words.shape)
        if ZEROS:
            zero = tl.broadcast_to(packed_zero(scales[chunk][1], DTYPE, ASM)[:, None], words.shape)
        else:
            zero = packed_zero(tl.full(words.shape, MIDDLE, tl.int32), DTYPE, ASM)
        weights = planes(words, odd, c_tile, zero, scale, DTYPE, True, ASM)
        for plane in tl.static_range(chunk * TOGETHER, (chunk + 1) * TOGETHER):
            i = first + plane * PLANE + c
            tl.store(out_rows + i[None, :], weights[plane], mask=ok[:, None] & (i < SIZE_IN)[None, :])
