"""Attention of a whole step: for each group of layers a pair of backends, one for prefill tokens and one for decode.

The two are often the same object. The prefill tokens of a step come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minisgl_backend.attention.base import (
    AttentionBackend,
    AttentionSpec,
    DecodeInputs,
    Plan,
    PrefillInputs,
    PromptInputs,
    QKNormRope,
    TokenPages,
)
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.attention.pass_attention import EagerPiece, PassAttention
from minisgl_backend.attention.pieces import PiecesPlan, plan_pieces
from minisgl_backend.kernels.recurrent.calls import ChunkBatch, WindowBatch


@dataclass(frozen=True)
class PairPlan:
    """Plans of the two parts, one for each group of layers; None for a part that the step does not have."""

    prefill: tuple[Plan, ...] | None
    decode: tuple[Plan, ...] | None
    num_prefill_tokens: int
    has_drafts: bool = False  # see DecodeInputs
    # The same two parts for layers with a state, where the model has such.
    chunks: ChunkBatch | None = None
    window: WindowBatch | None = None
    tokens: TokenPages | None = None  # where layers keep states with whole pages (`AttentionSpec.page_states`)


class AttentionPair:
    """`prefill` and `decode`: a backend for each of the spec's groups. All read the same pool."""

    def __init__(
        self, spec: AttentionSpec, prefill: Sequence[AttentionBackend], decode: Sequence[AttentionBackend]
    ) -> None:
        self.spec = spec
        self._prefill, self._decode = self.backends = tuple(prefill), tuple(decode)
        self._rotates = tuple(type(one).fuses_rope is not AttentionBackend.fuses_rope for one in self._decode)

    def plan(self, prefill: PrefillInputs | None, decode: DecodeInputs | None) -> PairPlan:
        """Plans one step without graphs. At least one part is given."""
        return PairPlan(
            prefill=tuple([self._plan_prefill(one, prefill) for one in self._prefill]) if prefill is not None else None,
            decode=tuple([one.plan_decode(decode.of(one.group.cache_group)) for one in self._decode])
            if decode is not None
            else None,
            num_prefill_tokens=int(prefill.cu_seqlens_q_host[-1]) if prefill is not None else 0,
            has_drafts=decode is not None and decode.has_drafts,
            chunks=None if prefill is None else prefill.chunks,
            window=None if decode is None else decode.window,
            tokens=self._tokens(prefill, decode),
        )

    def _plan_prefill(self, backend: AttentionBackend, inputs: PrefillInputs) -> Plan:
        inputs = inputs.of(backend.group.cache_group)
        in_pieces = inputs.pieces and not (inputs.whole_windowless and backend.group.window is None)
        return plan_pieces(backend, inputs) if in_pieces else backend.plan_prefill(inputs)

    def _tokens(self, prefill: PrefillInputs | None, decode: DecodeInputs | None) -> TokenPages | None:
        """Of a decode part alone, which may be captured, its own tensors."""
        if not self.spec.page_states:
            return None
        if prefill is None:
            assert decode is not None, "at least one part is given"
            return TokenPages(decode.rows, decode.kv_lens, decode.page_table)
        rows, ends = prefill.expanded()
        if decode is not None:
            rows, ends = torch.cat([rows, decode.rows]), torch.cat([ends, decode.kv_lens])
        return TokenPages(rows, ends, prefill.page_table)

    def attend(self, layer: AttentionLayer, q: torch.Tensor, plan: PairPlan) -> torch.Tensor:
        """q [num_tokens, num_q_heads, q_head_dim] -> output [num_tokens, num_q_heads, v_head_dim]."""
        group = layer.group
        if plan.decode is None:
            assert plan.prefill is not None, "at least one part is given"
            part = plan.prefill[group]
            if not isinstance(part, PiecesPlan):
                return self._prefill[group].prefill(layer, q, part)
        elif plan.prefill is None:
            return self._decode[group].decode(layer, q, plan.decode[group])
        size = self.spec.groups[group].v_head_dim
        out = torch.empty((*q.shape[:-1], size), dtype=self.spec.dtype, device=q.device)
        self.attend_into(layer, q, plan, out)
        return out

    def attend_into(self, layer: AttentionLayer, q: torch.Tensor, plan: PairPlan, out: torch.Tensor) -> None:
        """`attend` with its result in `out`."""
        group, first = layer.group, plan.num_prefill_tokens
        if plan.prefill is not None:
            part = plan.prefill[group]
            if isinstance(part, PiecesPlan):
                part.attend(self._prefill[group], layer, q[:first], out[:first])
            else:
                self._prefill[group].prefill_into(layer, q[:first], part, out[:first])
        if plan.decode is not None:
            self._decode[group].decode_into(layer, q[first:], plan.decode[group], out[first:])

    def decode_batches(self, max_batch: int) -> tuple[int, ...]:
        """See AttentionBackend."""
        return tuple(sorted({batch for one in self._decode for batch in one.decode_batches(max_batch)}))

    def length_bounds(self, batch_size: int) -> tuple[int, ...]:
        """See AttentionBackend."""
        return tuple(sorted({bound for one in self._decode for bound in one.length_bounds(batch_size)}))

    def fuses_rope(self, layer: AttentionLayer, plan: PairPlan) -> bool:
        """Whether `attend_with_rope` serves this step: decode only, on a backend that has a kernel for it."""
        if plan.prefill is not None or plan.decode is None or plan.has_drafts or not self._rotates[layer.group]:
            return False
        return self._decode[layer.group].fuses_rope(plan.decode[layer.group])

    def fuses_some_rope(self, plan: PairPlan) -> bool:
        """Whether `fuses_rope` is true for the layers of any group."""
        if plan.prefill is not None or plan.decode is None or plan.has_drafts:
            return False
        kinds = zip(self._rotates, self._decode, plan.decode, strict=True)
        return any(rotates and one.fuses_rope(part) for rotates, one, part in kinds)

    def attend_with_rope(
        self, layer: AttentionLayer, qkv: torch.Tensor, rotation: QKNormRope, plan: PairPlan
    ) -> torch.Tensor:
        """See AttentionBackend.decode_with_rope; only where `fuses_rope` is true."""
        assert plan.decode is not None, "fuses_rope says so"
        return self._decode[layer.group].decode_with_rope(layer, qkv, rotation, plan.decode[layer.group])

    @property
    def supports_graphs(self) -> bool:
        """Whether decode runs under CUDA graphs."""
        return all(one.supports_graphs for one in self._decode)

    def allocate_graph(self, max_batch_size: int) -> None:
        """See AttentionBackend: for decode steps."""
        for one in self._decode:
            one.allocate_graph(max_batch_size)

    def plan_capture(self, inputs: DecodeInputs) -> PairPlan:
        plans = tuple([one.plan_capture(inputs.of(one.group.cache_group)) for one in self._decode])
        tokens = self._tokens(None, inputs)
        return PairPlan(None, plans, 0, has_drafts=inputs.has_drafts, window=inputs.window, tokens=tokens)

    def plan_replay(self, inputs: DecodeInputs) -> None:
        for one in self._decode:
            one.plan_replay(inputs.of(one.group.cache_group))

    @property
    def supports_prompt_graphs(self) -> bool:
        """Whether passes of a single prompt can be captured whole."""
        return all(one.captures_prompts for one in self._prefill)

    def plan_prompt(self, inputs: PromptInputs) -> PairPlan:
        """See AttentionBackend."""
        plans = tuple([one.plan_prompt(inputs.of(one.group.cache_group)) for one in self._prefill])
        return PairPlan(plans, None, inputs.num_tokens)


@dataclass(frozen=True)
class StepAttention(PassAttention):
    """With the plan of one step, at once."""

    pair: AttentionPair
    plan: PairPlan

    def attend(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        return self.pair.attend(layer, q, self.plan)

    def run(self, piece: EagerPiece, x: torch.Tensor, slots: tuple[torch.Tensor, ...]) -> torch.Tensor:
        out = x.new_empty((len(x), *piece.shape_out))
        piece.run_into(x, slots, self.plan, out)
        return out

    def fuses_rope(self, layer: AttentionLayer) -> bool:
        return self.pair.fuses_rope(layer, self.plan)

    def attend_with_rope(self, layer: AttentionLayer, qkv: torch.Tensor, rotation: QKNormRope) -> torch.Tensor:
        return self.pair.attend_with_rope(layer, qkv, rotation, self.plan)
