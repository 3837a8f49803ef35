"""What goes from one layer to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minisgl_backend.tensor_parallel import SumWay

if TYPE_CHECKING:
    from minisgl_backend.kernels.collectives.copy_engines import Sent


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream, [num_tokens, hidden_size].

    With tensor parallelism the last product may not be in it yet. Each rank has a `partial` of it then, as large, and
    the next norm adds them up on its way (`RMSNorm.settle`); of many rows they are `sent` to the other ranks before.
    Or the sum over the ranks, in place, is on its way, and `arrival` waits for its end.

    In front of a mixture of experts the `product` may be yet to be done, of x [num_tokens, size_in] and a weight
    [hidden_size, size_in]: the router runs beside it then.
    """

    hidden: torch.Tensor
    partial: torch.Tensor | None = None
    sent: Sent | None = None
    arrival: Callable[[], object] | None = None
    product: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def way(self) -> SumWay:
        """How the last product is summed over the ranks."""
        if self.partial is None:
            return SumWay.IN_PLACE
        return SumWay.IN_NORM if self.sent is None else SumWay.SENT_AHEAD


# Of a long prompt the residual stream goes through products, norms and MLPs in two lanes, its first and its last rows:
# while the ranks' results of one are summed, the other one is computed. Anything else has one lane.
Lanes = tuple[Residual, ...]


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The lanes' rows in one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
