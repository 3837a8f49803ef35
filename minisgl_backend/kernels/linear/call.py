"""What a layer asks of a GEMM beside x and the weight: one value, whatever the weight's number format; and what the
choice of a kernel sees of it."""

from __future__ import annotations

from typing import NamedTuple

import torch

MEASURED_ROWS = (16, 8192)  # contenders are measured for powers of two in this range


class GemmCall(NamedTuple):
    """epilogue(norm(x) @ weight.T): x [num_tokens, size_in] -> [num_tokens, size_out].

    residual may be overwritten. With an activation (layers.config.Activation) the first half of the weight's rows and
    of bias is the gate, the second half up; the result is activation(gate) * up, [num_tokens, size_out / 2]; not
    together with residual.
    """

    norm_weight: torch.Tensor | None = None  # [size_in]: RMSNorm of x with `eps` first
    eps: float = 0.0
    bias: torch.Tensor | None = None  # [size_out]
    residual: torch.Tensor | None = None  # [num_tokens, size_out], added to the result
    activation: str | None = None
    # [num_tokens, size_out]: where the result is written; its rows may be further apart, and in another GPU's memory,
    # if kernels of this one can write there. With plain weights, not together with the others.
    out: torch.Tensor | None = None
    # The weight that the activated result is multiplied with next, by the same kernels: a kernel may return the result
    # as that weight takes it (FP8: quantize.QuantizedRows), which saves writing and reading it in 16 bits.
    feeds: object = None


class WeightKind(NamedTuple):
    """What a quantized weight is to the choice of its kernels, and to measuring them."""

    size_out: int  # gate and up rows both count
    size_in: int
    nbytes: int
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale of the weight; None: one per output
    repacked: str | None = None  # the layout of a library in which the weight is also held
    detail: str = ""  # what keys do not say of it, for the file of measured choices

    @classmethod
    def of(cls, numbers: torch.Tensor, block: tuple[int, int] | None = None) -> WeightKind:
        """Of numbers [(num_experts,) size_out, size_in] that have scales."""
        size_out, size_in = numbers.shape[-2:]
        return cls(size_out, size_in, numbers.nbytes, block)


class LinearKey(NamedTuple):
    """Key of the choice of a kernel for epilogue(norm(x) @ weight.T): x [rows, size_in], weight [size_out, size_in]."""

    rows: int
    size_out: int  # gate and up rows both count
    size_in: int
    dtype: torch.dtype  # of x
    norm: bool = False
    bias: bool = False
    residual: bool = False
    activation: str | None = None  # layers.config.Activation, of a gated weight
    unit_stride: bool = True  # the rows of x are contiguous
    into: bool = False  # the result's rows may be strided, and in another GPU's memory: no norm, no epilogue
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale of the weight; None: one per output
    repacked: str | None = None  # the layout of a library in which the weight is also held

    @property
    def weights(self) -> int:
        """Number of elements of the weight."""
        return self.size_out * self.size_in

    def is_aligned(self, numbers: int) -> bool:
        """Whether both sizes of the weight are multiples of `numbers`."""
        return self.size_out % numbers == 0 and self.size_in % numbers == 0

    @property
    def is_bare(self) -> bool:
        """Neither norm nor epilogue."""
        return not (self.norm or self.bias or self.residual or self.activation)


BARE = GemmCall()  # x @ weight.T


def representative_rows(rows: int) -> int:
    """The next power of two, within MEASURED_ROWS."""
    least, most = MEASURED_ROWS
    return min(max(least, 1 << (rows - 1).bit_length()), most)
