"""4-bit weights in plain torch: their one layout in memory, what CPUs run, and what GPUs' kernels are tested against.

A weight is scale * (number - zero point), with numbers of 0 to 15 and a scale (and a zero point) for each output and
group of inputs; symmetric weights have the zero point 8. All formats of checkpoints are repacked into one layout while
they are read (AWQ: Lin et al. 2023, GPTQ: Frantar et al. 2022).

The layout is made for kernels: inputs are split into blocks of 8 planes of 16 or 32 inputs each, and in a block each
output has one 32-bit word per input of a plane. Word 2 i + p // 4 holds inputs 2 i and 2 i + 1 of plane p: nibble p % 4
of its lower and of its upper half. So one shift and one logical operation make two neighbours, ready for a tensor core,
out of two adjacent words; and a plane is contiguous in x.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.linear.call import GemmCall, WeightKind
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.torch_ops import activate_mul

PLANES = 8
MIDDLE = 8  # the zero point of symmetric weights
_AT_ONCE = 1 << 18  # numbers
LEAST_GROUP = 16  # inputs: a plane has one scale, and tensor cores take at least 16 inputs


class Repacked(Protocol):
    """A second copy of a weight, in the layout of a library's kernel."""

    @property
    def layout(self) -> str:
        """As a `LinearKey.repacked`."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names in the table of choose.py."""

    def linear(self, x: torch.Tensor, kernel: str) -> torch.Tensor:
        """x [rows, size_in] @ weight.T by one of `kernels`"""


@dataclass(frozen=True, kw_only=True)
class Int4Weight:
    """One weight, or the weights of all experts, whose tensors then have experts as first dimension."""

    words: torch.Tensor  # int32 [size_out, padded inputs / 8]
    scales: torch.Tensor  # [num_groups, size_out], in the model's dtype; finite also for padding
    zeros: torch.Tensor | None = None  # uint8 [num_groups, size_out]; None: 8
    size_in: int
    group: int  # inputs with one scale
    plane: int
    repacked: Repacked | None = None
    kind: WeightKind = field(init=False)

    def __post_init__(self) -> None:
        layout = None if self.repacked is None else self.repacked.layout
        detail = f"groups of {self.group}" + ("" if self.zeros is None else " with zero points")
        kind = WeightKind(
            self.words.shape[-2], self.size_in, self.words.nbytes, repacked=layout,
            detail=detail if layout is None else f"{detail} {layout}",
        )  # fmt: skip
        object.__setattr__(self, "kind", kind)

    @property
    def size_out(self) -> int:
        return self.kind.size_out

    @property
    def padded(self) -> int:
        """Inputs including the padding of the last block, whose numbers are ignored."""
        return PLANES * self.words.shape[-1]

    def expert(self, index: int) -> Int4Weight:
        return Int4Weight(
            words=self.words[index],
            scales=self.scales[index],
            zeros=None if self.zeros is None else self.zeros[index],
            size_in=self.size_in,
            group=self.group,
            plane=self.plane,
        )


def plane_size(size_in: int, group: int) -> int:
    """Inputs of a plane: 32 where that needs no more padding, and no second scale."""
    return 32 if -(-size_in // 128) % 2 == 0 and group % 32 == 0 else 16


def padded_inputs(size_in: int, plane: int) -> int:
    return -(-size_in // (PLANES * plane)) * PLANES * plane


def num_groups(size_in: int, group: int, plane: int) -> int:
    """Groups including those of the last block's padding."""
    return -(-padded_inputs(size_in, plane) // group)


def pack(numbers: torch.Tensor, plane: int) -> torch.Tensor:
    """numbers uint8 [..., inputs], 0 to 15 -> words int32 [..., padded inputs / 8]."""
    size_in = numbers.shape[-1]
    if size_in < padded_inputs(size_in, plane):
        numbers = F.pad(numbers, (0, padded_inputs(size_in, plane) - size_in))
    words = torch.empty((*numbers.shape[:-1], numbers.shape[-1] // PLANES), dtype=torch.int32, device=numbers.device)
    rows, packed = numbers.flatten(0, -2), words.view(-1, words.shape[-1])
    for part in rows_at_once(rows):
        packed[part] = _packed(rows[part], plane)
    return words


def rows_at_once(matrix: torch.Tensor) -> Iterator[slice]:
    """Slices of rows: all of them on a GPU; on a CPU as many as its cache holds."""
    rows, size = matrix.shape
    count = max(1, rows if matrix.is_cuda else _AT_ONCE // max(1, size))
    return (slice(start, start + count) for start in range(0, rows, count))


def _packed(numbers: torch.Tensor, plane: int) -> torch.Tensor:
    # Two neighbours in 16 bits, so that an operation works on two numbers, and on many in a SIMD register.
    pairs = numbers.contiguous().view(torch.int16).unflatten(-1, (-1, 2, PLANES // 2, plane // 2))
    lower, upper = (pairs[..., first, :] | pairs[..., first + 1, :] << 4 for first in (0, 2))  # nibbles of a byte
    words = torch.empty((*lower.shape[:-2], plane // 2, 2, 2), dtype=torch.int16, device=numbers.device)
    words[..., 0].copy_(((lower & 0xFF) | upper << 8).transpose(-1, -2))
    words[..., 1].copy_(((lower >> 8 & 0xFF) | upper & -0x100).transpose(-1, -2))
    return words.view(torch.int32).flatten(-4)


def unpack(words: torch.Tensor, size_in: int, plane: int) -> torch.Tensor:
    """The inverse of `pack`: uint8 [..., size_in]."""
    halves = words.unflatten(-1, (-1, plane // 2, 2)).transpose(-1, -2).contiguous()  # block, half, pair
    pairs = torch.empty((*halves.shape[:-1], PLANES // 2, plane // 2), dtype=torch.int16, device=words.device)
    for nibble in range(PLANES // 2):
        of_both = halves >> 4 * nibble & 0x000F000F
        pairs[..., nibble, :].copy_(of_both | of_both >> 8)
    return pairs.flatten(-4).view(torch.uint8)[..., :size_in]


def dequantize(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """[..., size_out, size_in], computed in float32 and rounded once."""
    numbers = unpack(weight.words, weight.size_in, weight.plane).float()
    scales = _of_inputs(weight.scales.float(), weight)
    zeros = MIDDLE if weight.zeros is None else _of_inputs(weight.zeros.float(), weight)
    return ((numbers - zeros) * scales).to(dtype)


def _of_inputs(of_groups: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    """[..., groups, size_out] -> [..., size_out, size_in]"""
    return of_groups.transpose(-1, -2).repeat_interleave(weight.group, -1)[..., : weight.size_in]


def linear(device: GemmDevice, x: torch.Tensor, weight: Int4Weight, call: GemmCall) -> torch.Tensor:
    """See `GemmCall`."""
    norm_weight, eps, bias, residual, activation, *_ = call
    if norm_weight is not None:
        x = device.ops.rms_norm(x, norm_weight, eps)
    out = F.linear(x, dequantize(weight, x.dtype), bias)
    if activation is not None:
        out = activate_mul(out, activation)
    return out if residual is None else out.add_(residual)
