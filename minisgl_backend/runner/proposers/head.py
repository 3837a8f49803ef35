"""A head as a proposer: a layer that drafts from the model's hidden states, either EAGLE-3's (Li et al. 2025, "EAGLE-3:
Scaling up Inference Acceleration of Large Language Models via Training-Time Test") or a checkpoint's own (MTP). It
makes a chain of drafts, each from the head's own hidden state of the previous draft.

It observes the model's steps. At position p the head reads the model's hidden state of p and the token at p + 1, so
that a step's tokens give it the keys and values (or latents) of the positions before them; the states of each row's
last tokens are kept for that. So prompts, cached prefixes and steps without drafts need no separate pass. The last
position of a cached prefix may have been computed with another next token, which only lowers acceptance.

It samples as the model will, with the row's temperature and the noise of the position.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from minisgl_backend.arrays import Int32Array
from minisgl_backend.attention.base import DecodeInputs
from minisgl_backend.attention.pair import PairPlan, StepAttention
from minisgl_backend.config import EngineConfig
from minisgl_backend.layers.context import AuxStates, ForwardContext
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.decoder import CausalLM
from minisgl_backend.models.draft_head import DraftHead
from minisgl_backend.models.eagle3 import Eagle3Config
from minisgl_backend.models.eagle3_head import build_eagle3_head
from minisgl_backend.models.mtp import MtpConfig
from minisgl_backend.models.mtp_head import build_mtp_head
from minisgl_backend.runner.graphs.whole import DecodeOutputs, DecodeSteps
from minisgl_backend.runner.proposers.context import ProposerContext
from minisgl_backend.runner.proposers.model_proposer import ModelProposer
from minisgl_backend.runner.step_tensors import StepTensors
from minisgl_backend.speculative_config import MOST_DRAFTS
from minisgl_backend.weights.files import Checkpoint

KEPT = MOST_DRAFTS + 1  # tokens of a row whose states are kept: any of a step's may be the last accepted one


class HeadProposer(ModelProposer):
    """A step is one pass for each proposed token. All passes are replays of one captured graph, which follow each other
    without the host."""

    def __init__(self, context: ProposerContext, head: DraftHead, aux_layers: tuple[int, ...]) -> None:
        """`aux_layers`: of the target, see `AuxStates`."""
        super().__init__(context, head)
        self._head, self._aux_layers = head, aux_layers
        table, spec, size = self._table, self._attention.spec, head.config.hidden_size
        # For the last tokens of each row, by position modulo KEPT: combined states, and their slots. The slot tells
        # whether a state belongs to this row's sequence, whose cached prefix other sequences have computed.
        self._states = torch.zeros(table.max_rows, KEPT, size, dtype=spec.dtype, device=spec.device)
        self._slots = torch.full((table.max_rows, KEPT), -1, dtype=torch.int32, device=spec.device)
        self._chain = torch.zeros(table.max_rows, size, dtype=spec.dtype, device=spec.device)  # previous pass
        self._offsets = torch.arange(MOST_DRAFTS, dtype=torch.int32, device=spec.device)[:, None]

    def _passes(self) -> DecodeSteps:
        return DecodeSteps(self._pass, self._pass, None)

    def aux_states(self, num_tokens: int) -> AuxStates:
        spec = self._attention.spec
        out = torch.zeros(num_tokens, self._head.states_size, dtype=spec.dtype, device=spec.device)
        return AuxStates(layers=self._aux_layers, out=out)

    def observe(self, rows: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> None:
        hidden = self._head.combine(states)
        token_ids, (slots,) = self._table.lookup(rows, positions)
        before = (positions - 1).clamp_(min=0)
        _, (slots_before,) = self._table.lookup(rows, before)
        kept = before % KEPT
        previous, is_known = self._states[rows, kept], self._slots[rows, kept] == slots_before
        if len(rows) > 1:  # the previous token may be one of these
            follows = (rows[1:] == rows[:-1]) & (before[1:] == positions[:-1])
            previous[1:] = torch.where(follows[:, None], hidden[:-1], previous[1:])
            is_known[1:] |= follows
        is_known &= positions > 0
        # Unknown states go to the padding page as zeros, since NaN there would spread.
        previous = torch.where(is_known[:, None], previous, 0)
        tokens = ModelInput(token_ids, before)
        self._head.keep(tokens, previous, torch.where(is_known, slots_before, 0))
        if len(rows) > KEPT:  # a chunk's last states are kept, the others go to the padding row
            goes_on = rows[KEPT:] == rows[:-KEPT]
            padding = torch.where(goes_on, self._table.padding_row, rows[:-KEPT])
            rows = torch.cat([padding, rows[-KEPT:]])
        self._states[rows, positions % KEPT] = hidden
        self._slots[rows, positions % KEPT] = slots

    def propose(self, step: StepTensors) -> torch.Tensor:
        plan, decode = step.plan, step.decode
        assert decode is not None, "a step of proposals has rows"
        count = plan.num_proposing
        rows, lengths = decode.rows[:count], decode.kv_lens[:count]
        # The last position with a known state is the one before the last token's.
        torch.sub(decode.kv_lens, 1, out=decode.kv_lens).clamp_(min=1)
        self._chain[:count] = self._states[rows, (lengths - 1) % KEPT]
        rows_host, lengths_host = decode.rows_host, np.maximum(decode.kv_lens_host - 1, 1)
        for index in range(plan.num_proposed):
            self._next_pass(rows_host, lengths_host + np.int32(index))
        # All passes are launched before the first has ended; their tokens are read from the table together.
        first = lengths + (1 - plan.num_proposed)
        return self._table.tokens[rows, first + self._offsets[: plan.num_proposed]]

    def _next_pass(self, rows: Int32Array, lengths: Int32Array) -> None:
        """One draft for each of these entries, including padding; rows and lengths as in the staging buffer."""
        decode = self._builder.decode_inputs(rows, lengths)
        if self._graphs is not None and len(rows) in self.graph_sizes:
            self._graphs.plan_replay(decode)
            self._graphs.replay(len(rows))
        else:
            self._pass(decode, self._attention.plan(None, decode), captured=False)

    def _pass(self, decode: DecodeInputs, plan: PairPlan, captured: bool = True) -> DecodeOutputs:
        """One draft for each row, as captured: from the token table back into it, and on to the next position, so that
        the same graph is the next pass. A row has keys and values of `kv_lens` positions, the last of which is computed
        here."""
        rows, lengths, chain = decode.rows, decode.kv_lens, self._chain[: decode.batch_size]
        token_ids, _ = self._table.lookup(rows, lengths)
        positions = lengths - 1
        _, slots = self._table.lookup(rows, positions)
        ctx = ForwardContext(slots=slots, attention=StepAttention(self._attention, plan), captured=captured)
        drafted, states = self._head(ModelInput(token_ids, positions), chain, ctx)
        chain.copy_(states)
        logits = self._head.to_target_vocab(drafted)
        lengths.add_(1)  # also of padding, which has as many tokens as the shortest possible row
        # NaN logits may give any token id; the target's embedding only has rows for its vocabulary.
        sampled = self._sample(logits, rows, lengths).clamp_(0, self._head.config.vocab_size - 1)
        self._table.write_tokens(rows, lengths, sampled[0])
        return DecodeOutputs(logits, sampled)


class Eagle3Proposer(HeadProposer):
    """A published head in a folder of its own, which reads three of the target's hidden states."""

    def __init__(self, context: ProposerContext) -> None:
        config, target = context.draft.model, context.target
        assert isinstance(config, Eagle3Config), "as `read_draft_model` reads it"
        assert isinstance(target, CausalLM), "other targets are refused before"
        head = build_eagle3_head(config, context.draft.model_dir, context.load, embedding=target.model.embed_tokens)
        super().__init__(context, head, config.states_of(target.config))

    @classmethod
    def read_draft_model(cls, config: EngineConfig, folder: Path, target: ModelConfig, target_dir: Path) -> ModelConfig:
        head = Eagle3Config.load(folder)
        head.states_of(target)
        # Its config tells the positions of its training: it drafts beyond them.
        return replace(head, max_position=target.max_position, default_length=None)


class MtpProposer(HeadProposer):
    """A layer of the target's checkpoint, which reads the target's hidden states behind the final norm."""

    def __init__(self, context: ProposerContext) -> None:
        config, target = context.draft.model, context.target
        assert isinstance(config, MtpConfig), "as `read_draft_model` reads it"
        assert isinstance(target, CausalLM), "other targets are refused before"
        head = build_mtp_head(config, context.draft.model_dir, context.load, model=target)
        super().__init__(context, head, (target.config.num_layers,))

    @classmethod
    def read_draft_model(cls, config: EngineConfig, folder: Path, target: ModelConfig, target_dir: Path) -> ModelConfig:
        head = MtpConfig.of(target, target.quantization.with_option(config.quantization))
        if not config.dummy_weights:
            head.check_stored(Checkpoint(folder, target.tensor_names).names())
        # Drafted are all positions that the target has.
        return replace(head, default_length=None)
