"""GEMMs of experts in MXFP4, in the Triton language: an expert's weights times the tokens of a tile.

Weights are converted to bfloat16 in registers, exactly: the bits of a 4-bit number are moved to the sign, the low
exponent bits and the high mantissa bit of a bfloat16, which gives 2^-126 of its value; one multiplication restores the
value. Weights are the first operand of the tensor cores, which may come from registers; tokens are the second.

So that weights become operands without an exchange between threads and with few instructions, `pack` reorders blocks:
16-bit word e of a block holds the numbers e, 8 + e, 16 + e and 24 + e. The bits of the first are where a bfloat16 has
them, those of the next two are 3 and 6 bits lower, and the last takes the remaining bits.

Joined, the four tensors of a step have its inputs in their order, in registers that the tensor cores take as they are:
one product for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import gate_mul
from minisgl_backend.kernels.moe.few_plan import read_tile
from minisgl_backend.kernels.moe.tiles import pairs_of_tile

# Two 16-bit words to their eight numbers as packed bfloat16: sign in bit 15, the other bits in bits 8 to 6, multiplied
# by 2^126 times the scale.
_TO_BFLOAT16 = tl.constexpr(
    """
    {
    .reg .b32 t, z;
    mov.b32 z, 0x80008000;
    and.b32 $0, $4, 0x81C081C0;
    fma.rn.bf16x2 $0, $0, $5, z;
    shl.b32 t, $4, 3;
    and.b32 $1, t, 0x81C081C0;
    fma.rn.bf16x2 $1, $1, $5, z;
    shl.b32 t, $4, 6;
    and.b32 $2, t, 0x81C081C0;
    fma.rn.bf16x2 $2, $2, $5, z;
    shl.b32 t, $4, 1;
    and.b32 $3, t, 0x80008000;
    shr.u32 t, $4, 5;
    lop3.b32 $3, t, 0x01000100, $3, 0xEA;
    shr.u32 t, $4, 4;
    lop3.b32 $3, t, 0x00C000C0, $3, 0xEA;
    fma.rn.bf16x2 $3, $3, $5, z;
    }
    """
)


@triton.jit
def spread_bits(words, place: tl.constexpr):
    """Number `place` of each 16-bit word, as uint32: its sign in bit 15, its other bits in bits 8 to 6."""
    if place < 3:
        return (words << (3 * place)) & 0x81C081C0
    else:
        return ((words << 1) & 0x80008000) | ((words >> 5) & 0x01000100) | ((words >> 4) & 0x00C000C0)


@triton.jit
def _number(words, place: tl.constexpr, scale):
    """What the assembly computes for number `place` of each word, in float32."""
    bits = spread_bits(words.to(tl.uint32) & 0xFFFF, place)
    value = (bits << 16).to(tl.float32, bitcast=True)
    return value * (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _dequantize(words, scales, MACHINE: tl.constexpr):
    """words int16 [rows, 8 * blocks], scales uint8 [rows, blocks] -> the four numbers of each word, four tensors of the
    shape of words."""
    rows: tl.constexpr = words.shape[0]
    count: tl.constexpr = words.shape[1]
    factors = (scales.to(tl.int16) + 126) << 7  # bits of bfloat16
    factors = tl.broadcast_to(factors[:, :, None], [rows, count // 8, 8]).reshape(rows, count)
    if MACHINE:
        return tl.inline_asm_elementwise(
            _TO_BFLOAT16, "=&r,=&r,=&r,=&r,r,r", [words, factors],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return (
            _number(words, 0, factors), _number(words, 1, factors), _number(words, 2, factors),
            _number(words, 3, factors),
        )  # fmt: skip


@triton.jit
def _in_order(w0, w1, w2, w3):
    """The four numbers of each word [rows, words] in the order of their inputs: [rows, 4 * words]."""
    rows: tl.constexpr = w0.shape[0]
    words: tl.constexpr = w0.shape[1]
    joined = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    blocks = tl.reshape(joined, (rows, words // 8, 8, 2, 2))
    return tl.reshape(tl.permute(blocks, (0, 1, 3, 4, 2)), (rows, 4 * words))


@triton.jit
def _product(
    x_rows, pair_ok, weight_ptr, scale_ptr, row, row_ok,
    SIZE_IN: tl.constexpr, SCALES: tl.constexpr, PAIRS: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr,
    MACHINE: tl.constexpr,
):  # fmt: skip
    """Weight rows @ tokens: float32 [TILE_OUT, PAIRS]. x_rows: pointers [PAIRS]. row int64 [TILE_OUT]."""
    acc = tl.zeros([TILE_OUT, PAIRS], tl.float32)
    e, i = tl.arange(0, TILE_IN // 4), tl.arange(0, TILE_IN)
    numbers = weight_ptr + row[:, None] * (SIZE_IN // 4) + e[None, :]
    scales = scale_ptr + row[:, None] * SCALES + tl.arange(0, TILE_IN // 32)[None, :]
    inputs = x_rows[:, None] + i[None, :]
    for start in tl.range(0, SIZE_IN, TILE_IN):
        ok = e < (SIZE_IN - start) // 4
        w = tl.load(numbers + start // 4, mask=row_ok[:, None] & ok[None, :], other=0)
        s = tl.load(scales + start // 32, mask=row_ok[:, None], other=0)
        x = tl.load(inputs + start, mask=pair_ok[:, None] & (i < SIZE_IN - start)[None, :], other=0.0)
        w0, w1, w2, w3 = _dequantize(w, s, MACHINE)
        acc = tl.dot(_in_order(w0, w1, w2, w3).to(x.dtype), tl.trans(x), acc, input_precision="ieee")
    return acc


@triton.jit
def _finish(
    acc, bias_ptr, out_ptr, out_stride, weight_row, row, row_ok, target, pair_weight, pair_ok,
    SIZE_OUT: tl.constexpr, PAIRS: tl.constexpr, TILE_OUT: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Bias, and the activation or the pair's weight. row: of the tile's first output. target int64 [PAIRS]."""
    if BIAS:
        acc += tl.load(bias_ptr + weight_row, mask=row_ok, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (TILE_OUT // 2, 2, PAIRS)), (0, 2, 1)))
        acc = gate_mul(gate, up, ACTIVATION)
        o = row // 2 + tl.arange(0, TILE_OUT // 2)
    else:
        acc = acc * pair_weight[None, :]
        o = row + tl.arange(0, TILE_OUT)
    size: tl.constexpr = SIZE_OUT // 2 if GATED else SIZE_OUT
    address = target[None, :] * out_stride + o[:, None]
    tl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=pair_ok[None, :] & (o < size)[:, None])


@triton.jit
def grouped_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, order_ptr, expert_ptr, first_ptr, end_ptr, pair_weight_ptr,
    x_stride, out_stride,
    K: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, SCALES: tl.constexpr, PAIRS: tl.constexpr,
    TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    MACHINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GATED: activation(gate @ x) * (up @ x), read by token and written in sorted order. Else: read in sorted order,
    written by pair and multiplied by the pair's weight."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    tile = tl.program_id(1)
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    pair, i, i_ok = pairs_of_tile(order_ptr, first_ptr, end_ptr, tile, PAIRS)
    if GATED:
        source, target = pair // K, i
        pair_weight = tl.zeros([PAIRS], tl.float32)
    else:
        source, target = i, pair
        pair_weight = tl.load(pair_weight_ptr + pair, mask=i_ok, other=0.0).to(tl.float32)
    row = tl.program_id(0) * TILE_OUT
    rows = row + tl.arange(0, TILE_OUT)
    row_ok, weight_row = rows < SIZE_OUT, expert * SIZE_OUT + rows
    x_rows = x_ptr + source.to(tl.int64) * x_stride
    acc = _product(
        x_rows, i_ok, weight_ptr, scale_ptr, weight_row, row_ok,
        SIZE_IN, SCALES, PAIRS, TILE_OUT, TILE_IN, MACHINE,
    )  # fmt: skip
    _finish(
        acc, bias_ptr, out_ptr, out_stride, weight_row, row, row_ok, target.to(tl.int64), pair_weight, i_ok,
        SIZE_OUT, PAIRS, TILE_OUT, GATED, ACTIVATION, BIAS,
    )  # fmt: skip


@triton.jit
def few_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, tiles_ptr, pair_weights_ptr, x_stride,
    K: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, SCALES: tl.constexpr, PAIRS: tl.constexpr,
    TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    PACKED: tl.constexpr, MACHINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For each pair. GATED: activation(gate @ x) * (up @ x), with x of the pair's token. Else: down @ x, with x of the
    pair, times the pair's weight. Reads the plan and waits for the previous kernel as in few_tokens.py."""
    if PDL:
        if GATED:
            tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    expert, pair, pair_ok = read_tile(tiles_ptr, tl.program_id(1), tl.num_programs(1), K, PAIRS, PACKED)
    if expert < 0:
        return
    row = tl.program_id(0) * TILE_OUT
    rows = row + tl.arange(0, TILE_OUT)
    row_ok, weight_row = rows < SIZE_OUT, expert * SIZE_OUT + rows
    source = pair // K if GATED else pair
    x_rows = x_ptr + source.to(tl.int64) * x_stride
    if PDL and not GATED:
        tl_cuda.gdc_wait()
    acc = _product(
        x_rows, pair_ok, weight_ptr, scale_ptr, weight_row, row_ok,
        SIZE_IN, SCALES, PAIRS, TILE_OUT, TILE_IN, MACHINE,
    )  # fmt: skip
    pair_weight = tl.load(pair_weights_ptr + pair, mask=pair_ok, other=0.0)
    _finish(
        acc, bias_ptr, out_ptr, SIZE_OUT // 2 if GATED else SIZE_OUT, weight_row, row, row_ok, pair.to(tl.int64),
        pair_weight, pair_ok, SIZE_OUT, PAIRS, TILE_OUT, GATED, ACTIVATION, BIAS,
    )  # fmt: skip
