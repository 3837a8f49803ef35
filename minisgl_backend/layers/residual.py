"""What goes from one layer to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream, [num_tokens, hidden_size].

    With tensor parallelism the last product may not be in it yet: each rank has a `partial` of it then, as large, and
    the next norm adds them up on its way (`RMSNorm.settle`), which saves two kernels.
    """

    hidden: torch.Tensor
    partial: torch.Tensor | None = None
