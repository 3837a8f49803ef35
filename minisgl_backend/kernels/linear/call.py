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


BARE = GemmCall()  # x @ weight.T
