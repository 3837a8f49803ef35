"""GEMMs and look-ups with GGUF's blocks on a GPU, in the layout of `packed.py`.

Up to some tens of rows the weights become operands in registers (int4/many_rows.py); for more, parts of the weight are
dequantized, and cuBLAS multiplies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.launch import cdiv
from minisgl_backend.kernels.linear.call import BARE, GemmCall
from minisgl_backend.kernels.linear.epilogue import apply_epilogue
from minisgl_backend.kernels.linear.gguf.numbers import plane_of_block
from minisgl_backend.kernels.linear.gguf.packed import BLOCK, PLANE, PackedBlocks, PackedWeight
from minisgl_backend.kernels.linear.int4 import many_rows
from minisgl_backend.kernels.linear.int4.dequantized import by_parts
from minisgl_backend.kernels.linear.int4.few_rows import uses_assembly, words_of
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.linear.plain import gpu as plain

_TILE_OUT, _TILE_IDS = 32, 8


Multiply = Callable[[GemmDevice, torch.Tensor, PackedBlocks, GemmCall], torch.Tensor]


def run(device: GemmDevice, x: torch.Tensor, weight: PackedWeight, call: GemmCall) -> torch.Tensor:
    """See `GemmCall`; x in bfloat16."""
    return _of_pieces(device, x, weight, call, many_rows.run)


def run_dequantized(device: GemmDevice, x: torch.Tensor, weight: PackedWeight, call: GemmCall) -> torch.Tensor:
    return _of_pieces(device, x, weight, call, _dequantized)


def _of_pieces(
    device: GemmDevice, x: torch.Tensor, weight: PackedWeight, call: GemmCall, multiply: Multiply
) -> torch.Tensor:
    if call.norm_weight is not None:
        x, call = device.ops.rms_norm(x, call.norm_weight, call.eps), call._replace(norm_weight=None)

    def of(piece: PackedBlocks | torch.Tensor, asked: GemmCall) -> torch.Tensor:
        return (plain.cublas if isinstance(piece, torch.Tensor) else multiply)(device, x, piece, asked)  # type: ignore

    if len(weight.pieces) == 1:
        return of(weight.pieces[0], call)
    return apply_epilogue(device, torch.cat([of(one, BARE) for one in weight.pieces], -1), call)


def _dequantized(device: GemmDevice, x: torch.Tensor, piece: PackedBlocks, call: GemmCall) -> torch.Tensor:
    return apply_epilogue(device, by_parts(x, piece, dequantize_rows, device.scratch), call)


def rows_of(device: GemmDevice, weight: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
    """ids int [count], within a weight of one tensor -> [count, inputs] in bfloat16."""
    (piece,) = weight.pieces
    if isinstance(piece, torch.Tensor):
        return torch.nn.functional.embedding(ids, piece)
    out = torch.empty((len(ids), piece.size_in), dtype=torch.bfloat16, device=ids.device)
    _dequantize(piece, out, 0, len(ids), ids)
    return out


def dequantize_rows(weight: PackedBlocks, rows: slice, out: torch.Tensor) -> torch.Tensor:
    """out [outputs of `rows`, size_in], bfloat16 or float32."""
    _dequantize(weight, out, rows.start, rows.stop)
    return out


def _dequantize(
    weight: PackedBlocks, out: torch.Tensor, start: int, stop: int, ids: torch.Tensor | None = None
) -> None:
    """Outputs from `start` to `stop`, or those of `ids`."""
    tile, words = _TILE_OUT if ids is None else _TILE_IDS, weight.words
    if stop == start:
        return
    _dequantize_kernel[(weight.fields.shape[0], cdiv(stop - start, tile))](
        words, words if weight.low is None else weight.low, weight.fields, words if ids is None else ids, out, start,
        stop, IDS=ids is not None, SIZE_IN=weight.size_in, WORDS=words.shape[-1], FIELDS=weight.fields.shape[1],
        FIELD_STRIDE=weight.fields.stride(1), EIGHT=weight.low is not None, TILE_OUT=tile, PLANE=PLANE, BLOCK=BLOCK,
        ASM=uses_assembly(out), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["start", "stop"])
def _dequantize_kernel(
    words_ptr, low_ptr, fields_ptr, ids_ptr, out_ptr, start, stop,
    IDS: tl.constexpr, SIZE_IN: tl.constexpr, WORDS: tl.constexpr, FIELDS: tl.constexpr, FIELD_STRIDE: tl.constexpr,
    EIGHT: tl.constexpr, TILE_OUT: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One block of inputs per program."""
    place = start + tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
    ok = place < stop
    row = place.to(tl.int64)
    if IDS:
        row = tl.load(ids_ptr + place, mask=ok, other=0).to(tl.int64)
    block = tl.program_id(0)
    c = tl.arange(0, PLANE)
    words = words_of(words_ptr + row[:, None] * WORDS, c[None, :], ok[:, None], block * PLANE, ASM)
    low = words
    if EIGHT:
        low = words_of(low_ptr + row[:, None] * WORDS, c[None, :], ok[:, None], block * PLANE, ASM)
    fields: tl.tuple = ()
    for one in tl.static_range(FIELDS):
        fields += (tl.load(fields_ptr + (block * FIELDS + one) * FIELD_STRIDE + row, mask=ok, other=0),)
    out_rows = out_ptr + (place - start).to(tl.int64)[:, None] * SIZE_IN
    for plane in tl.static_range(8):
        numbers = plane_of_block(words, low, fields, plane, EIGHT, out_ptr.dtype.element_ty, ASM)
        i = block * BLOCK + plane * PLANE + c
        tl.store(out_rows + i[None, :], numbers, mask=ok[:, None] & (i < SIZE_IN)[None, :])
