"""From 4-bit numbers to operands of tensor cores, in the Triton language: see `int4_torch` for the layout.

A 4-bit number n set into the low bits of a float gives 128 + n in bfloat16 (0x4300) and 1,024 + n in float16 (0x6400);
one logical operation makes two of them (Kim et al. 2022, "Who Says Elephants Can't Run"). Subtracting the zero point,
encoded the same way, is exact. Written in assembly, because the compiler would make each number separately.

Assembly gets two neighbours of a tensor at once (`pack`), which must be words 2 i and 2 i + 1. They are neighbours in
the layout of a tensor core's operand, and in the layout in which words are loaded. Without `ASM` (Triton's interpreter,
float32) the same is computed number by number.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl


def _assembly(magic: str, kind: str, scaled: bool, numbers: Sequence[int] = range(8)) -> str:
    """$0 to $7, or as many as there are `numbers`: the planes; behind them two words, their packed zero point twice and
    their packed scale."""
    code, first = [".reg .b32 t, one, none;"], len(numbers)
    for place, plane in enumerate(numbers):
        word, nibble = f"${first + plane // 4}", plane % 4
        if nibble:
            code.append(f"shr.u32 t, {word}, {4 * nibble};")
        code.append(f"lop3.b32 ${place}, {'t' if nibble else word}, 0x000F000F, {magic}, 0xEA;")
    planes, zero, scale = [f"${place}" for place in range(first)], f"${first + 2}", f"${first + 4}"
    if kind == "bf16x2":  # before Hopper there is no other instruction for them
        code.append("mov.b32 one, 0x3F803F80; mov.b32 none, 0x80008000;")
        code += [f"fma.rn.{kind} {plane}, {plane}, one, {zero};" for plane in planes]
        code += [f"fma.rn.{kind} {plane}, {plane}, {scale}, none;" for plane in planes if scaled]
    else:
        code += [f"sub.{kind} {plane}, {plane}, {zero};" for plane in planes]
        code += [f"mul.{kind} {plane}, {plane}, {scale};" for plane in planes if scaled]
    return "{" + " ".join(code) + "}"


_BFLOAT16 = tl.constexpr(_assembly("0x43004300", "bf16x2", False))
_BFLOAT16_SCALED = tl.constexpr(_assembly("0x43004300", "bf16x2", True))
_FLOAT16 = tl.constexpr(_assembly("0x64006400", "f16x2", False))
_FLOAT16_SCALED = tl.constexpr(_assembly("0x64006400", "f16x2", True))
_BFLOAT16_PLANES = tl.constexpr(tuple(_assembly("0x43004300", "bf16x2", True, (plane,)) for plane in range(8)))
_FLOAT16_PLANES = tl.constexpr(tuple(_assembly("0x64006400", "f16x2", True, (plane,)) for plane in range(8)))
_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 6))
PAIR = tl.constexpr(0x00010001)
SIGNS = tl.constexpr(0x80008000 - (1 << 32))  # sign bits of two packed numbers


@triton.jit
def packed_zero(zero, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Zero points for `planes`: int32, two copies of what is subtracted (bfloat16: added); unchanged without ASM."""
    if not ASM:
        return zero.to(tl.int32)
    elif tl.bfloat16 == DTYPE:
        return ((zero.to(tl.int32) + 0x4300) * PAIR) | SIGNS
    else:
        return (zero.to(tl.int32) + 0x6400) * PAIR


@triton.jit
def packed_scale(scale, ASM: tl.constexpr):
    """Scales for `planes`: int32 with two copies; without ASM unchanged."""
    if ASM:
        return scale.to(tl.uint16, bitcast=True).to(tl.int32) * PAIR
    else:
        return scale


@triton.jit
def planes(words, odd, c, zero, scale, DTYPE: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr):
    """The eight planes of a tile of words, in DTYPE: number - zero, with SCALED times scale.

    zero, scale: `packed_zero`, `packed_scale`, of the shape of `words`. Without ASM, index c of `words` holds word
    c // 2 * 2, and of `odd` the word after it; with ASM `words` holds word c, and `odd` and `c` are unused.
    """
    if ASM and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            _BFLOAT16_SCALED if SCALED else _BFLOAT16, _CONSTRAINTS, [words, zero, scale], dtype=(tl.bfloat16,) * 8,
            is_pure=True, pack=2,
        )  # fmt: skip
    elif ASM:
        return tl.inline_asm_elementwise(
            _FLOAT16_SCALED if SCALED else _FLOAT16, _CONSTRAINTS, [words, zero, scale], dtype=(tl.float16,) * 8,
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        found: tl.tuple = ()
        for plane in tl.static_range(8):
            word = words if plane < 4 else odd
            number = (((word >> (4 * (plane % 4) + 16 * (c % 2))) & 15) - zero).to(tl.float32)
            if SCALED:
                number = number * scale.to(tl.float32)
            found += (number.to(DTYPE),)
        return found


@triton.jit
def plane_of(words, odd, c, zero, scale, PLANE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """One of the eight `planes`, scaled."""
    if ASM and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            _BFLOAT16_PLANES[PLANE], "=&r,r,r,r,r,r,r", [words, zero, scale], dtype=tl.bfloat16, is_pure=True, pack=2
        )  # fmt: skip
    elif ASM:
        return tl.inline_asm_elementwise(
            _FLOAT16_PLANES[PLANE], "=&r,r,r,r,r,r,r", [words, zero, scale], dtype=tl.float16, is_pure=True, pack=2
        )  # fmt: skip
    else:
        word = words if PLANE < 4 else odd
        number = (((word >> (4 * (PLANE % 4) + 16 * (c % 2))) & 15) - zero).to(tl.float32)
        return (number * scale.to(tl.float32)).to(DTYPE)
