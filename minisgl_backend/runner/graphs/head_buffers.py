"""Queries and attention outputs at fixed addresses, for passes that are captured around attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.attention.layer import AttentionLayer


@dataclass(frozen=True)
class HeadBuffers:
    """A pair of buffers for each number and size of heads that layers of the model have; layers alike share one, since
    they attend one after the other."""

    queries: tuple[torch.Tensor, ...]  # by pair: [num_tokens, num_q_heads, q_head_dim]
    attended: tuple[torch.Tensor, ...]  # [num_tokens, num_q_heads, v_head_dim]
    pair_of_group: tuple[int, ...]  # by group of the spec

    @classmethod
    def allocate(cls, spec: AttentionSpec, num_tokens: int) -> HeadBuffers:
        heads = [(group.num_q_heads, group.q_head_dim, group.v_head_dim) for group in spec.groups]
        pairs = list(dict.fromkeys(heads))

        def zeros(num_heads: int, head_dim: int) -> torch.Tensor:
            return torch.zeros((num_tokens, num_heads, head_dim), dtype=spec.dtype, device=spec.device)

        return cls(
            queries=tuple(zeros(count, q_dim) for count, q_dim, _ in pairs),
            attended=tuple(zeros(count, v_dim) for count, _, v_dim in pairs),
            pair_of_group=tuple(pairs.index(one) for one in heads),
        )

    def first(self, num_tokens: int) -> HeadBuffers:
        """Views of the first rows."""
        queries, attended = (tuple([one[:num_tokens] for one in rows]) for rows in (self.queries, self.attended))
        return HeadBuffers(queries, attended, self.pair_of_group)

    def clear_attended(self, begin: int, end: int) -> None:
        """Sets these rows of all outputs to zero."""
        for one in self.attended:
            one[begin:end].zero_()

    def of(self, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and outputs of a layer."""
        pair = self.pair_of_group[layer.group]
        return self.queries[pair], self.attended[pair]
