"""Experts in MXFP4 for a few tokens and for many, in the Triton language: two grouped GEMMs.

Weights become bfloat16 in registers, exactly: a number of four bits is moved to where a bfloat16 has its sign, the end
of its exponent and the start of its mantissa, which makes it 2^-126 of what it is; one multiplication brings it to its
size. Weights are the first operand of the matrix units, which may come from registers; tokens are the second.

So that integers become operands without an exchange between threads and with few instructions, `pack` lays blocks out
anew: 16 bits, the e-th of a block, hold the numbers e, 8 + e, 16 + e and 24 + e. The first is where a bfloat16 has it,
the next two are 3 and 6 bits lower, and the last is in the bits that are left.

`pdl`: programmatic dependent launch, whose rules stand in linear/small_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import gate_mul
from minisgl_backend.kernels.elementwise import combine
from minisgl_backend.kernels.launch import pdl_options
from minisgl_backend.kernels.linear.small_rows import LinearWorkspace
from minisgl_backend.kernels.moe import few_tokens
from minisgl_backend.kernels.moe.align import align
from minisgl_backend.kernels.moe.mxfp4_torch import Biases, Weight
from minisgl_backend.kernels.shared_memory import LARGEST, shared_memory

_SCALES_PADDED = 16  # the scales of a row are a multiple of it: tiles may read beyond the row's end
MEAN_PAIRS = (12, 24, 48)  # of an expert: up to each of them, another cut is best
LARGEST_SCALE = 128  # of E8M0: 2^126 times it has to be a bfloat16


@dataclass(frozen=True)
class ProductShape:
    """How one GEMM is cut: outputs a tile (rows of the weight), inputs a step, warps, stages.

    At least 4 bytes of scales a thread and step: else they are not fetched ahead.
    """

    tile_out: int
    tile_in: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Mxfp4Shape:
    """How the two GEMMs of a mixture are cut; pairs of (token, expert) a tile."""

    tile_pairs: int
    gate_up: ProductShape
    down: ProductShape


def few_shape(num_tokens: int) -> Mxfp4Shape:
    """For few_tokens' plan. Measured best on an H100, 4 of 32 experts of 2,880 x 2,880."""
    if num_tokens <= 8:
        return Mxfp4Shape(few_tokens.SLOTS, ProductShape(64, 256, 4, 4), ProductShape(64, 256, 4, 3))
    if num_tokens <= 32:
        return Mxfp4Shape(few_tokens.SLOTS, ProductShape(128, 256, 4, 3), ProductShape(64, 256, 4, 4))
    return Mxfp4Shape(few_tokens.SLOTS, ProductShape(128, 128, 4, 3), ProductShape(128, 256, 4, 3))


def grouped_shape(pairs: int, num_experts: int, shared: int = LARGEST) -> Mxfp4Shape:
    """By the pairs of an expert, likewise. Smaller tiles where a program has less than `shared` bytes of shared memory
    than Hopper's."""
    few, some, many = (mean * num_experts for mean in MEAN_PAIRS)
    if pairs <= few:
        return _alike(16, ProductShape(128, 128, 4, 4))
    if pairs <= some:
        return _alike(32, ProductShape(128, 128, 4, 4))
    if pairs <= many or shared < LARGEST:
        return _alike(64, ProductShape(128, 128, 4, 3))
    return _alike(128, ProductShape(256, 128, 8, 3))


def _alike(tile_pairs: int, cut: ProductShape) -> Mxfp4Shape:
    return Mxfp4Shape(tile_pairs, cut, cut)


def pack(blocks: torch.Tensor, scales: torch.Tensor) -> Weight:
    """A checkpoint's blocks uint8 [experts, outputs, blocks, 16] and scales uint8 [experts, outputs, blocks] -> numbers
    int16 [experts, outputs, 8 * blocks] in the order of these kernels, and scales with padded rows."""
    experts, outputs, count, _ = blocks.shape
    words = torch.empty((experts, outputs, 8 * count), dtype=torch.int16, device=blocks.device)
    for expert in range(experts):
        numbers = torch.stack([blocks[expert] & 15, blocks[expert] >> 4], dim=-1).flatten(-2).unflatten(-1, (4, 8))
        first, second, third, last = numbers.int().unbind(-2)
        word = _spread(first) << 6 | _spread(second) << 3 | _spread(third)
        word |= (last & 8) << 11 | (last & 4) << 11 | (last & 3) << 10
        words[expert] = word.flatten(-2)  # wraps around: the bits are what matters
    return words, torch.nn.functional.pad(scales, (0, -scales.shape[-1] % _SCALES_PADDED))


def _spread(number: torch.Tensor) -> torch.Tensor:
    """The sign 9 bits above the lowest, as far as it is in a bfloat16 from the three others."""
    return (number & 8) << 6 | number & 7


def moe(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
    biases: Biases | None = None,
    *,
    shape: Mxfp4Shape | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """The contract is `Mxfp4Kernels.moe`'s, with weights of `pack`; nothing waits for the device."""
    (num_experts, hidden, quarter), k, pairs = down[0].shape, expert_ids.shape[1], expert_ids.numel()
    size = 4 * quarter
    if pairs == 0:
        return torch.empty_like(x) if residual is None else residual.clone()
    shape = shape or grouped_shape(pairs, num_experts, shared_memory(x.device))
    tiles = align(expert_ids.contiguous(), num_experts, shape.tile_pairs, pdl)
    activated = torch.empty((pairs, size), dtype=x.dtype, device=x.device)
    result = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    inner, outer = biases or (None, None)
    count = tiles.expert.numel()
    shared = (tiles.order, tiles.expert, tiles.first, tiles.end, expert_weights.contiguous())
    cut = shape.gate_up
    _grouped_kernel[(triton.cdiv(2 * size, cut.tile_out), count)](
        x, *gate_up, gate_up[0] if inner is None else inner, activated, *shared, x.stride(0), SIZE_OUT=2 * size,
        SIZE_IN=hidden, GATED=True, ACTIVATION=activation, BIAS=inner is not None,
        **_options(x, gate_up, cut, shape.tile_pairs, k, pdl),
    )  # fmt: skip
    cut = shape.down
    _grouped_kernel[(triton.cdiv(hidden, cut.tile_out), count)](
        activated, *down, down[0] if outer is None else outer, result, *shared, activated.stride(0), SIZE_OUT=hidden,
        SIZE_IN=size, GATED=False, ACTIVATION=None, BIAS=outer is not None,
        **_options(x, down, cut, shape.tile_pairs, k, pdl),
    )  # fmt: skip
    return combine(result, k, residual, pdl)


def mixture_of_few(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    experts_per_token: int,
    renormalize: bool,
    workspace: LinearWorkspace,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
    router_bias: torch.Tensor | None = None,
    biases: Biases | None = None,
    shape: Mxfp4Shape | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """The contract is `Mxfp4Kernels.mixture`'s, for what `few_tokens.serves`, with weights of `pack`."""
    (_, hidden, quarter), k, num_tokens = down[0].shape, experts_per_token, len(x)
    size, shape = 4 * quarter, shape or few_shape(num_tokens)
    normed, plan = few_tokens.route(
        x, router, k, renormalize, workspace, norm_weight=norm_weight, eps=eps, bias=router_bias, pdl=pdl
    )
    activated = torch.empty((num_tokens * k, size), dtype=x.dtype, device=x.device)
    result = torch.empty((num_tokens * k, hidden), dtype=x.dtype, device=x.device)
    inner, outer = biases or (None, None)
    cut = shape.gate_up
    _few_kernel[(triton.cdiv(2 * size, cut.tile_out), plan.max_tiles)](
        normed, *gate_up, gate_up[0] if inner is None else inner, activated, plan.tiles, plan.weights,
        normed.stride(0), SIZE_OUT=2 * size, SIZE_IN=hidden, GATED=True, ACTIVATION=activation,
        BIAS=inner is not None, PACKED=plan.is_packed, **_options(x, gate_up, cut, few_tokens.SLOTS, k, pdl),
    )  # fmt: skip
    cut = shape.down
    _few_kernel[(triton.cdiv(hidden, cut.tile_out), plan.max_tiles)](
        activated, *down, down[0] if outer is None else outer, result, plan.tiles, plan.weights, activated.stride(0),
        SIZE_OUT=hidden, SIZE_IN=size, GATED=False, ACTIVATION=None, BIAS=outer is not None, PACKED=plan.is_packed,
        **_options(x, down, cut, few_tokens.SLOTS, k, pdl),
    )  # fmt: skip
    return combine(result, k, residual, pdl)


def _options(
    x: torch.Tensor, weight: Weight, cut: ProductShape, tile_pairs: int, k: int, pdl: bool
) -> dict[str, int | bool]:
    """What both kernels are launched with. Numbers of two bytes are made by machine instructions, which Triton's
    interpreter does not know."""
    return {
        "K": k, "SCALES": weight[1].shape[-1], "PAIRS": tile_pairs, "TILE_OUT": cut.tile_out, "TILE_IN": cut.tile_in,
        "MACHINE": x.device.type == "cuda" and x.element_size() == 2, "num_warps": cut.num_warps,
        "num_stages": cut.num_stages, **pdl_options(pdl),
    }  # fmt: skip


# Of two integers of 16 bits, their four numbers as bfloat16, two by two: sign in bit 15, the others in bits 8 to 6, and
# multiplied by 2^126 times the scale.
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
    """Of one number of each 16 bits, in uint32: its sign in bit 15, the others in bits 8 to 6."""
    if place < 3:
        return (words << (3 * place)) & 0x81C081C0
    else:
        return ((words << 1) & 0x80008000) | ((words >> 5) & 0x01000100) | ((words >> 4) & 0x00C000C0)


@triton.jit
def _number(words, place: tl.constexpr, scale):
    """What the machine instructions make of one place, in float32."""
    bits = spread_bits(words.to(tl.uint32) & 0xFFFF, place)
    value = (bits << 16).to(tl.float32, bitcast=True)
    return value * (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _dequantize(words, scales, MACHINE: tl.constexpr):
    """words int16 [rows, 8 * blocks], scales uint8 [rows, blocks] -> the numbers at four places, each of the shape
    of words."""
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
def _product(
    x_rows, pair_ok, weight_ptr, scale_ptr, row, row_ok,
    SIZE_IN: tl.constexpr, SCALES: tl.constexpr, PAIRS: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr,
    MACHINE: tl.constexpr,
):  # fmt: skip
    """weight rows times tokens: float32 [TILE_OUT, PAIRS]. x_rows: pointers [PAIRS]. row int64 [TILE_OUT]."""
    acc = tl.zeros([TILE_OUT, PAIRS], tl.float32)
    e = tl.arange(0, TILE_IN // 4)
    numbers = weight_ptr + row[:, None] * (SIZE_IN // 4) + e[None, :]
    scales = scale_ptr + row[:, None] * SCALES + tl.arange(0, TILE_IN // 32)[None, :]
    inputs = x_rows[None, :] + ((e // 8) * 32 + e % 8)[:, None]
    for start in tl.range(0, SIZE_IN, TILE_IN):
        ok = e < (SIZE_IN - start) // 4
        w = tl.load(numbers + start // 4, mask=row_ok[:, None] & ok[None, :], other=0)
        s = tl.load(scales + start // 32, mask=row_ok[:, None], other=0)
        x_ok = pair_ok[None, :] & ok[:, None]
        x0 = tl.load(inputs + start, mask=x_ok, other=0.0)
        x1 = tl.load(inputs + start + 8, mask=x_ok, other=0.0)
        x2 = tl.load(inputs + start + 16, mask=x_ok, other=0.0)
        x3 = tl.load(inputs + start + 24, mask=x_ok, other=0.0)
        w0, w1, w2, w3 = _dequantize(w, s, MACHINE)
        acc = tl.dot(w0.to(x0.dtype), x0, acc, input_precision="ieee")
        acc = tl.dot(w1.to(x1.dtype), x1, acc, input_precision="ieee")
        acc = tl.dot(w2.to(x2.dtype), x2, acc, input_precision="ieee")
        acc = tl.dot(w3.to(x3.dtype), x3, acc, input_precision="ieee")
    return acc


@triton.jit
def _finish(
    acc, bias_ptr, out_ptr, weight_row, row, row_ok, target, pair_weight, pair_ok,
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
    address = target[None, :] * size + o[:, None]
    tl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=pair_ok[None, :] & (o < size)[:, None])


@triton.jit
def _grouped_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, order_ptr, expert_ptr, first_ptr, end_ptr, pair_weight_ptr,
    x_stride,
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
    i = tl.load(first_ptr + tile) + tl.arange(0, PAIRS)
    i_ok = i < tl.load(end_ptr + tile)
    pair = tl.load(order_ptr + i, mask=i_ok, other=0)
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
        x_rows, i_ok, weight_ptr, scale_ptr, weight_row, row_ok, SIZE_IN, SCALES, PAIRS, TILE_OUT, TILE_IN, MACHINE
    )
    _finish(
        acc, bias_ptr, out_ptr, weight_row, row, row_ok, target.to(tl.int64), pair_weight, i_ok,
        SIZE_OUT, PAIRS, TILE_OUT, GATED, ACTIVATION, BIAS,
    )  # fmt: skip


@triton.jit
def _few_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, tiles_ptr, pair_weights_ptr, x_stride,
    K: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, SCALES: tl.constexpr, PAIRS: tl.constexpr,
    TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    PACKED: tl.constexpr, MACHINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """By pair. GATED: activation(gate @ x) * (up @ x), of the pair's token. Else: down @ x of the pair, times its
    weight. The plan is read, and what starts early waits, as in few_tokens.py."""
    if PDL:
        if GATED:
            tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    expert, pair, pair_ok = few_tokens.read_tile(tiles_ptr, tl.program_id(1), tl.num_programs(1), K, PAIRS, PACKED)
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
        x_rows, pair_ok, weight_ptr, scale_ptr, weight_row, row_ok, SIZE_IN, SCALES, PAIRS, TILE_OUT, TILE_IN, MACHINE
    )
    pair_weight = tl.load(pair_weights_ptr + pair, mask=pair_ok, other=0.0)
    _finish(
        acc, bias_ptr, out_ptr, weight_row, row, row_ok, pair.to(tl.int64), pair_weight, pair_ok,
        SIZE_OUT, PAIRS, TILE_OUT, GATED, ACTIVATION, BIAS,
    )  # fmt: skip
