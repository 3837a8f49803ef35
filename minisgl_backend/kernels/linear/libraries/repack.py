"""Shared by the 4-bit weight layouts of library kernels: splitting of groups, and words of eight neighbouring inputs as
in GPTQ's files."""

from __future__ import annotations

import math

import torch

from minisgl_backend.kernels.linear.int4.reference import Int4Weight, unpack

LARGEST_GROUP = 128  # inputs with one scale: larger groups are split
DTYPES = (torch.float16, torch.bfloat16)
# vLLM's ids of number formats: mantissa bits << 8 | bias << 17 | kind of NaN and infinities << 50.
UINT4 = 4 << 8 | 1 << 50
UINT4_LESS_8 = UINT4 | 8 << 17
_IN_WORD = 8
_AT_ONCE = 1 << 25  # numbers repacked at a time: a byte each, and a few more for temporaries


def kind(weight: Int4Weight) -> int:
    """Of its numbers."""
    return UINT4_LESS_8 if weight.zeros is None else UINT4


def cut_group(weight: Int4Weight) -> int:
    """Inputs with one scale, after groups larger than LARGEST_GROUP are split."""
    return math.gcd(weight.group, LARGEST_GROUP)


def of_groups(values: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    """[weight's groups, size_out] -> [groups of `cut_group` inputs, size_out]; the same memory where none is split."""
    times, count = weight.group // cut_group(weight), weight.size_in // cut_group(weight)
    return (values if times == 1 else values.repeat_interleave(times, 0))[:count]


def words_by_output(weight: Int4Weight) -> torch.Tensor:
    """int32 [size_out, size_in / 8]: number i of eight is in bits 4 i to 4 i + 3."""
    words = weight.words.new_empty((weight.size_out, weight.size_in // _IN_WORD))
    step = max(1, _AT_ONCE // weight.size_in)
    for start in range(0, weight.size_out, step):
        some = slice(start, start + step)
        words[some] = in_words(unpack(weight.words[some], weight.size_in, weight.plane))
    return words


def in_words(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n], 0 to 15 -> int32 [..., n / 8]: number i of eight is in bits 4 i to 4 i + 3."""
    eights = numbers.contiguous().view(torch.int64)
    eights = (eights | eights >> 4) & 0x00FF00FF00FF00FF
    eights = (eights | eights >> 8) & 0x0000FFFF0000FFFF
    return (eights | eights >> 16).view(torch.int32)[..., ::2].contiguous()
