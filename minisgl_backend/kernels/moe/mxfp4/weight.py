"""Numbers in MXFP4: what checkpoints have of them.

MXFP4 (OCP Microscaling Formats 1.0): 4-bit numbers, E2M1, in blocks of 32 along the inputs, and a power of two for each
block, E8M0. The lower half of a byte is the earlier number. Rows of gate and up alternate, as in checkpoints of
gpt-oss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 32  # numbers that share a scale
BLOCK_BYTES = BLOCK // 2
SCALE_BIAS = 127  # exponent bias of E8M0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Mxfp4Weight(NamedTuple):
    """All experts of a layer; rows of gate and up by turns, in their biases, too."""

    numbers: torch.Tensor  # blocks uint8 [experts, outputs, blocks, 16], or as `grouped.pack` has them
    scales: torch.Tensor  # uint8 [experts, outputs, blocks], or with padded rows

    @property
    def outputs(self) -> int:
        return self.numbers.shape[1]

    @property
    def inputs(self) -> int:
        """Of packed numbers: four in a word."""
        return 4 * self.numbers.shape[2]


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """blocks uint8 [..., blocks, 16], scales uint8 [..., blocks] -> [..., 32 * blocks]. Exact in float32 and bfloat16,
    except for the smallest and largest scales."""
    numbers = torch.tensor(E2M1, dtype=torch.float32, device=blocks.device)
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    values = torch.ldexp(numbers[halves.int()], scales.int().unsqueeze(-1) - SCALE_BIAS)
    return values.flatten(-2).to(dtype)
