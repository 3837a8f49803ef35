"""What a layer asks of a GEMM beside x and the weight: one value, whatever the weight's number format."""

from __future__ import annotations

from typing import NamedTuple

import torch


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


BARE = GemmCall()  # x @ weight.T
