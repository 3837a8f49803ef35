"""From GGUF's blocks as `packed.py` has them to operands of tensor cores, in the Triton language.

As in int4/planes.py; the layout's scales are bfloat16, and so is what is made of them. In bfloat16 128 + b is 0x4300
+ b for the six bits of a scale or a minimum as well: one permutation of bytes makes both.
"""

from __future__ import annotations

import triton
import triton.language as tl

_CONSTANTS = ".reg .b32 t, u, one, none; mov.b32 one, 0x3F803F80; mov.b32 none, 0x80008000;"
_NIBBLES = "0x000F000F, 0x43004300, 0xEA;"


def _nibble(target: str, word: str, plane: int, less: str) -> str:
    """Two numbers of a plane, less a constant."""
    shift = f"shr.u32 t, {word}, {4 * (plane % 4)};" if plane % 4 else f"mov.b32 t, {word};"
    return f"{shift} lop3.b32 {target}, t, {_NIBBLES} fma.rn.bf16x2 {target}, {target}, one, {less};"


def _four_bits(plane: int, zero: str, addend: str) -> str:
    """$0: two numbers; $1, $2: neighbouring words, $3 two copies of the scale, $5 of what is added."""
    return (
        f"{{ {_CONSTANTS} mov.b32 u, {zero}; {_nibble('$0', f'${1 + plane // 4}', plane, 'u')} "
        f"fma.rn.bf16x2 $0, $0, $3, {addend}; }}"
    )


def _eight_bits(plane: int, addend: str) -> str:
    """$0: two numbers; $1, $2: words of upper halves, $3, $4 of lower ones, $5 two copies of the scale, $7 of what is
    added."""
    upper, lower = f"${1 + plane // 4}", f"${3 + plane // 4}"
    return (
        f"{{ .reg .b32 v, w; {_CONSTANTS} mov.b32 u, 0xC308C308; mov.b32 w, 0xC300C300; "
        f"{_nibble('$0', upper, plane, 'u')} {_nibble('v', lower, plane, 'w')} "
        f"mov.b32 u, 0x41804180; fma.rn.bf16x2 $0, $0, u, v; fma.rn.bf16x2 $0, $0, $5, {addend}; }}"
    )


_FOUR = tl.constexpr(tuple(_four_bits(plane, "0xC308C308", "none") for plane in range(8)))
_FOUR_AND_MINIMA = tl.constexpr(tuple(_four_bits(plane, "0xC300C300", "$5") for plane in range(8)))
_EIGHT = tl.constexpr(tuple(_eight_bits(plane, "none") for plane in range(8)))
_EIGHT_AND_MINIMA = tl.constexpr(tuple(_eight_bits(plane, "$7") for plane in range(8)))
# $0: two copies of a plane's scale; $1: the word of two planes.
_SCALE = tl.constexpr(("prmt.b32 $0, $1, $1, 0x1010;", "prmt.b32 $0, $1, $1, 0x3232;"))
# $0, $1: two copies of a plane's scale, and of its minimum, negative; $2: the word of two planes, $3 the factors.
_SCALE_AND_MINIMUM = tl.constexpr(
    tuple(
        f"{{ {_CONSTANTS} mov.b32 u, 0x43434343; prmt.b32 t, $2, u, {order}; mov.b32 u, 0xC300C300; "
        "fma.rn.bf16x2 t, t, one, u; fma.rn.bf16x2 t, t, $3, none; "
        "prmt.b32 $0, t, t, 0x1010; prmt.b32 $1, t, t, 0x3232; }"
        for order in ("0x4140", "0x4342")
    )
)


@triton.jit
def _upper(words):
    """The upper halves of words as bfloat16, in float32."""
    return (words & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _copies(word, UPPER: tl.constexpr, ASM: tl.constexpr):
    """Two copies of a half of each word, a bfloat16; without ASM it in float32."""
    if ASM:
        return tl.inline_asm_elementwise(_SCALE[UPPER], "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return _upper(word if UPPER else word << 16)


@triton.jit
def _factored(word, factors, PLANE: tl.constexpr, ASM: tl.constexpr):
    """Scales and minima of a plane, of six bits each, times their factors."""
    if ASM:
        return tl.inline_asm_elementwise(
            _SCALE_AND_MINIMUM[PLANE % 2], "=&r,=&r,r,r", [word, factors], dtype=(tl.int32, tl.int32), is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        half = word >> (16 * (PLANE % 2)) & 0xFFFF
        return (half & 255).to(tl.float32) * _upper(factors << 16), (half >> 8).to(tl.float32) * _upper(factors)


@triton.jit
def plane_of_block(
    words, low, fields, PLANE: tl.constexpr, EIGHT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Plane PLANE of a tile of words, in DTYPE: [outputs, words]. words, low: each a tile and that of its neighbours,
    as `few_rows.words_of` gives them; low: where numbers have EIGHT bits. fields: each [outputs], see packed.py."""
    FIELDS: tl.constexpr = len(fields)
    MINIMA: tl.constexpr = FIELDS == 5
    c = tl.broadcast_to(tl.arange(0, words[0].shape[1])[None, :], words[0].shape)
    if FIELDS == 8:
        scale = tl.where(c < 16, _copies(fields[PLANE], 0, ASM)[:, None], _copies(fields[PLANE], 1, ASM)[:, None])
        minimum = scale
    elif MINIMA:
        scale, minimum = _factored(fields[PLANE // 2], fields[4], PLANE, ASM)
        scale, minimum = tl.broadcast_to(scale[:, None], c.shape), tl.broadcast_to(minimum[:, None], c.shape)
    else:
        scale = tl.broadcast_to(_copies(fields[PLANE // 2], PLANE % 2, ASM)[:, None], c.shape)
        minimum = scale
    if ASM and EIGHT:
        return tl.inline_asm_elementwise(
            _EIGHT_AND_MINIMA[PLANE] if MINIMA else _EIGHT[PLANE], "=&r,r,r,r,r,r,r,r,r",
            [words[0], low[0], scale, minimum], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif ASM:
        return tl.inline_asm_elementwise(
            _FOUR_AND_MINIMA[PLANE] if MINIMA else _FOUR[PLANE], "=&r,r,r,r,r,r,r", [words[0], scale, minimum],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        shift = 4 * (PLANE % 4) + 16 * (c % 2)
        number = (words[PLANE // 4] >> shift) & 15
        if EIGHT:
            number = 16 * number - 128 + ((low[PLANE // 4] >> shift) & 15)
        elif not MINIMA:
            number = number - 8
        found = number.to(tl.float32) * scale
        if MINIMA:
            found += minimum
        return found.to(DTYPE)
