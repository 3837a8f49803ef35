"""`Int4Kernels` on a GPU: which kernel serves how many rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels import elementwise
from minisgl_backend.kernels.launch import cdiv
from minisgl_backend.kernels.linear import int4
from minisgl_backend.kernels.linear.call import BARE, GemmCall
from minisgl_backend.kernels.linear.choose import LinearKey, linear_chooser
from minisgl_backend.kernels.linear.int4_planes import packed_scale, packed_zero, planes
from minisgl_backend.kernels.linear.int4_second import layout_of
from minisgl_backend.kernels.linear.int4_torch import MIDDLE, PLANES, Int4Kernels, Int4Weight, SecondLayout
from minisgl_backend.kernels.linear.plain.gpu import TritonPlainKernels

SCRATCH_BYTES = 128 << 20  # for a dequantized part of a weight: smaller parts would be too small for cuBLAS
_TILE_OUT = 32


class TritonInt4Kernels(Int4Kernels):
    """See `Int4Kernels`. Nothing synchronises with the device."""

    def __init__(self, plain: TritonPlainKernels, device: torch.device) -> None:
        """plain: of the same device; its workspace is shared, so the kernels must not overlap."""
        super().__init__(plain)
        self._triton = plain
        self._linear_chooser = linear_chooser("int4", plain.ops.facts)
        self._scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
        self._device = device

    def second_layout_bytes(self, weight: Int4Weight) -> int:
        found = layout_of(weight, self._device, self._triton.ops.facts)
        return 0 if found is None else found[0].bytes(weight)

    def second_layout(self, weight: Int4Weight) -> SecondLayout | None:
        found = layout_of(weight, self._device, self._triton.ops.facts)
        return None if found is None else found[1].repack(weight)

    def linear(self, x: torch.Tensor, weight: Int4Weight, call: GemmCall = BARE) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        second = None if weight.second is None else weight.second.layout
        key = LinearKey.of(x, weight.size_out, call, second_layout=second)
        return self.multiply(self._linear_chooser.kernel(key), x, weight, call)

    def multiply(self, kernel: str, x: torch.Tensor, weight: Int4Weight, call: GemmCall) -> torch.Tensor:
        """See `measured.Multiply`."""
        if kernel == "torch":
            return super().linear(x, weight, call)
        pdl = self._triton.ops.pdl(x)
        norm_weight, eps, bias, residual, activation = call
        if norm_weight is not None:
            x = self.ops.rms_norm(x, norm_weight, eps)
        if kernel == "int4_few_rows":
            return int4.linear(
                x, weight, self._triton.workspace, call, num_sms=self._triton.ops.facts.multiprocessors, pdl=pdl
            )
        if weight.second is not None and kernel in weight.second.kernels:
            out = weight.second.linear(x, kernel)
        else:
            out = self._by_parts(x, weight)
        if bias is not None:
            out += bias
        if activation is not None:
            return elementwise.activate_mul(out, activation, pdl)
        return out if residual is None else residual.add_(out)

    def prepare_linear(self, weights: Sequence[Int4Weight], rows: Sequence[int], longest: int) -> None:
        first = weights[0]
        self._triton.kernel_tuner.tune(
            self._linear_chooser, self.multiply, weights, first.words.nbytes, (first.size_out, first.size_in), rows,
            longest, detail=f"groups of {first.group}" + ("" if first.zeros is None else " with zero points")
            + ("" if first.second is None else f" {first.second.layout}"),
        )  # fmt: skip

    def _by_parts(self, x: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
        """x @ weight.T, dequantizing as many outputs at a time as fit into the scratch buffer."""
        out = torch.empty((len(x), weight.size_out), dtype=x.dtype, device=x.device)
        step = max(_TILE_OUT, len(self._scratch) // (x.element_size() * weight.size_in) // _TILE_OUT * _TILE_OUT)
        for start in range(0, weight.size_out, step):
            rows = slice(start, min(start + step, weight.size_out))
            torch.mm(x, dequantize_rows(weight, rows, x.dtype, self._scratch).t(), out=out[:, rows])
        return out


def dequantize_rows(weight: Int4Weight, rows: slice, dtype: torch.dtype, scratch: torch.Tensor) -> torch.Tensor:
    """[outputs of `rows`, size_in], in `scratch` (uint8) where it fits."""
    count, block = rows.stop - rows.start, PLANES * weight.plane
    size = count * weight.size_in * dtype.itemsize
    if size <= len(scratch):
        out = scratch[:size].view(dtype).view(count, weight.size_in)
    else:
        out = torch.empty((count, weight.size_in), dtype=dtype, device=scratch.device)
    _dequantize_kernel[(weight.padded // block, cdiv(count, _TILE_OUT))](
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
    """Outputs from `start` to `stop`, one block of inputs per program."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = start + tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
    ok = row < stop
    at = tl.program_id(0) * PLANE
    c = tl.arange(0, PLANE)
    word_rows = words_ptr + row.to(tl.int64)[:, None] * WORDS
    words, odd = int4.words_of(word_rows, c[None, :], ok[:, None], at, ASM)
    scales = int4.scales_of(scales_ptr, zeros_ptr, row, ok, at, WIDTH, GROUP, PLANE, TOGETHER, ZEROS)
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
            i = at * 8 + plane * PLANE + c
            tl.store(out_rows + i[None, :], weights[plane], mask=ok[:, None] & (i < SIZE_IN)[None, :])
