"""GEMMs with weights in the model's own number format.

`PlainKernels` is the contract; `reference.TorchPlainKernels` serves it on every device and is the reference that other
implementations are tested against.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from minisgl_backend.kernels.linear.call import BARE, GemmCall
from minisgl_backend.kernels.linear.measured import KernelTuner
from minisgl_backend.kernels.ops import Ops


class PlainKernels(ABC):
    """GEMMs on tensors of one device. Chosen once; weights of the format `plain` hold it.

    Statistics and activations are computed in float32 whatever the format of the tensors is.
    No method synchronises with the device.
    """

    kernel_tuner: KernelTuner | None = None  # for other formats on this device; None: their kernels are not measured

    def __init__(self, ops: Ops) -> None:
        """ops: of the same device."""
        self.ops = ops

    @abstractmethod
    def linear(self, x: torch.Tensor, weight: torch.Tensor, call: GemmCall = BARE) -> torch.Tensor:
        """See `GemmCall`: x [num_tokens, size_in], weight [size_out, size_in] -> [num_tokens, size_out]."""

    def linear_into(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """x @ weight.T into out [num_tokens, size_out], whose rows may be strided.

        `out` may be in another GPU's memory, if kernels of this one can write there.
        """
        out.copy_(self.linear(x, weight))

    def prepare_linear(  # noqa: B027  optional
        self, weights: Sequence[torch.Tensor], rows: Sequence[int], longest: int = 0
    ) -> None:
        """Chooses (and may measure) the kernels of `linear` for these weights, all of one shape: for these decode row
        counts, and for prefill up to `longest` rows.

        Called once before anything is captured, or not at all: `linear` needs it for speed only.
        """
