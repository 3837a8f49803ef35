"""From 4-bit numbers to operands of tensor cores, in the Triton language: see `int4_torch` for the layout.

A number n of 4 bits set into the low bits of a float is 128 + n in bfloat16 (0x4300) and 1,024 + n in float16 (0x6400),
of which two are made at once, in one logical operation (Kim et al. 2022, "Who Says Elephants Can't Run"). Less
the zero point, taken the same way, both are exact. As assembly, because the compiler would make each number by itself.

Assembly gets two neighbours of a tensor at once (`pack`), which must be words 2 i and 2 i + 1: so they are in the
layouts of a tensor core's operand, and in those in which words are read. Without `ASM` (Triton's interpreter, float32)
the same is computed number by number.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _assembly(magic: str, kind: str, scaled: bool) -> str:
    """$0 to $7: the planes; $8 and $9: two words, $10 their packed zero point, $12 their packed scale."""
    lines = [".reg .b32 t, one, none;"]
    for plane in range(8):
        word, nibble = f"${8 + plane // 4}", plane % 4
        if nibble:
            lines.append(f"shr.u32 t, {word}, {4 * nibble};")
        lines.append(f"lop3.b32 ${plane}, {'t' if nibble else word}, 0x000F000F, {magic}, 0xEA;")
    planes = [f"${plane}" for plane in range(8)]
    if kind == "bf16x2":  # before Hopper there is no other instruction for them
        lines.append("mov.b32 one, 0x3F803F80; mov.b32 none, 0x80008000;")
        lines += [f"fma.rn.{kind} {plane}, {plane}, one, $10;" for plane in planes]
        lines += [f"fma.rn.{kind} {plane}, {plane}, $12, none;" for plane in planes if scaled]
    else:
        lines += [f"sub.{kind} {plane}, {plane}, $10;" for plane in planes]
        lines += [f"mul.{kind} {plane}, {plane}, $12;" for plane in planes if scaled]
    return "{" + " ".join(lines) + "}"


_BFLOAT16 = tl.constexpr(_assembly("0x43004300", "bf16x2", False))
_BFLOAT16_SCALED = tl.constexpr(_assembly("0x43004300", "bf16x2", True))
_FLOAT16 = tl.constexpr(_assembly("0x64006400", "f16x2", False))
_FLOAT16_SCALED = tl.constexpr(_assembly("0x64006400", "f16x2", True))
_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 6))
PAIR = tl.constexpr(0x00010001)
SIGNS = tl.constexpr(0x80008000 - (1 << 32))  # of two


@triton.jit
def packed_zero(zero, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """What `planes` takes as zero points: int32, twice what is subtracted, or in bfloat16 added; or as it is."""
    if not ASM:
        return zero.to(tl.int32)
    elif tl.bfloat16 == DTYPE:
        return ((zero.to(tl.int32) + 0x4300) * PAIR) | SIGNS
    else:
        return (zero.to(tl.int32) + 0x6400) * PAIR


@triton.jit
def packed_scale(scale, ASM: tl.constexpr):
    """What `planes` takes as scales."""
    if ASM:
        return scale.to(tl.uint16, bitcast=True).to(tl.int32) * PAIR
    else:
        return scale


@triton.jit
def planes(words, odd, c, zero, scale, DTYPE: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr):
    """The eight planes of a tile of words, in DTYPE: number - zero, with SCALED times scale.

    zero, scale: `packed_zero`, `packed_scale`, of the shape of `words`. Without ASM `words` holds word c // 2 * 2 at
    place c, and `odd` the one after it; with ASM `words` holds word c, and `odd` and `c` are of no use.
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
