"""What some passes do between a decoder's layers: add planes of given vectors, keep hidden states for drafting."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.layers.norm import Norm
from minisgl_backend.layers.residual import MicroBatches, join


@dataclass(frozen=True)
class Borders:
    """Of one pass. Border i is before layer i, and the last one behind all layers."""

    kept: dict[int, list[torch.Tensor]]  # by border, of the last one behind the final norm: where hidden states go
    rows: torch.Tensor | None  # of given vectors
    planes: dict[int, torch.Tensor]  # by border

    @classmethod
    def of_pass(cls, tokens: ModelInput, ctx: ForwardContext) -> Borders | None:
        """None: nothing happens at any."""
        aux = None if ctx.is_warm_up else ctx.aux
        if aux is None and tokens.given is None:
            return None
        kept = {} if aux is None else aux.by_layer()
        if tokens.given is None:
            return cls(kept, None, {})
        return cls(kept, tokens.given.rows, {layer + 1: plane for layer, plane in tokens.given.planes})

    def needs_all(self, border: int) -> bool:
        """Whether all tokens must get there."""
        return border in self.kept or border in self.planes

    def cross(self, border: int, micro_batches: MicroBatches, norm: Norm | None) -> MicroBatches:
        """Adds and keeps what this one asks for, one before a layer; `norm`: the layer's."""
        if border in self.planes:
            micro_batches = self.add(border, micro_batches, norm)
        if border not in self.kept:
            return micro_batches
        settled, states = zip(*[one.whole(norm) for one in micro_batches], strict=True)
        for out in self.kept[border]:
            for part, state in zip(out.split([one.num_tokens for one in settled]), states, strict=True):
                part.copy_(state)
        return tuple(settled)

    def add(self, border: int, micro_batches: MicroBatches, norm: Norm | None) -> MicroBatches:
        """Adds the plane of this one, if it has one; `norm`: the next."""
        if self.rows is None or border not in self.planes:
            return micro_batches
        whole = join(tuple([one.whole(norm)[0] for one in micro_batches]))
        return whole.plus_at(self.rows, self.planes[border]).split([one.num_tokens for one in micro_batches])

    def keep(self, border: int, hidden: torch.Tensor) -> None:
        """Keeps what the last one asks for: hidden [num_tokens, hidden_size], behind the final norm."""
        for out in self.kept.get(border, ()):
            out.copy_(hidden)
