"""Executes step plans on one device: prepare, execute, and a PendingStep to wait on.

One runner per tensor-parallel rank. Every rank executes the same plans in the same order; rank 0 samples, and the
others take its tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from minisgl_backend.adapters.slots import AdapterSlots
from minisgl_backend.arrays import Int32Array
from minisgl_backend.attention.base import DecodeInputs
from minisgl_backend.attention.pair import AttentionPair, PairPlan
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.recurrent.choose import recurrent_kernels
from minisgl_backend.kernels.sampling import layout
from minisgl_backend.kv.groups import ColumnLayout
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.kv.state import StatePool
from minisgl_backend.layers.context import AuxStates
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.runner.async_output import Computed, PendingStep, ResultReader, Sampled, UnsampledStep
from minisgl_backend.runner.batch import BatchBuilder
from minisgl_backend.runner.graphs.pieces import PiecewiseRunner, no_aux_states
from minisgl_backend.runner.graphs.whole import DecodeOutputs, DecodeParts, DecodeSteps, GraphRunner
from minisgl_backend.runner.model_pass import Model, ModelPass
from minisgl_backend.runner.pooling import Pooled, pool
from minisgl_backend.runner.prepared import AnyBatch, Batch, PromptBatch, ProposerBatch
from minisgl_backend.runner.proposers.proposer import DeviceProposer
from minisgl_backend.runner.row_adapters import RowAdapters
from minisgl_backend.runner.row_state import RowState
from minisgl_backend.runner.staging import MaskStaging
from minisgl_backend.runner.states import StateTables
from minisgl_backend.runner.step_tensors import HostBatch, StepTensors
from minisgl_backend.runner.vectors import Vectors
from minisgl_backend.sampling import logprobs
from minisgl_backend.sampling.metadata import GrammarMasks, SamplingInputs
from minisgl_backend.step import StepDecisions, StepPlan
from minisgl_backend.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Captures:
    """What a runner captures once its pool exists; None: it has none of that kind."""

    graphs: GraphRunner | None = None  # of the decode step; they serve steps without a prefill part that fit
    pieces: PiecewiseRunner | None = None  # of the forward pass; they serve steps with a prefill part that fit
    longest_prefill: int | None = None  # tokens up to which GEMMs are measured, and those of the sizes of `graphs`
    proposer_graphs: GraphRunner | None = None  # of the proposer's passes
    adapter_graphs: GraphRunner | None = None  # as `graphs` and of its sizes, for steps whose rows have adapters


class ModelRunner:
    """One rank's executor. Used by one thread; computes on the stream that is current when it is called."""

    def __init__(
        self,
        *,
        model: Model,
        attention: AttentionPair,
        pool: KVPool,
        rows: RowState,
        tp: TensorParallel | None = None,
        proposer: DeviceProposer | None = None,
        states: StatePool | None = None,
        vectors: Vectors | None = None,
        adapters: AdapterSlots | None = None,
        captures: Captures = Captures(),
    ) -> None:
        """Chooses kernels, then captures: the runner is complete once it is constructed. The layers of `proposer`
        follow the model's in the pool. states: of a model with states; vectors: of a model that sees; adapters: those
        that rows may have."""
        table, sampling = rows.table, rows.sampling
        graphs, pieces, longest_prefill = captures.graphs, captures.pieces, captures.longest_prefill
        self._model = model
        self.attention = attention
        self._pool = pool
        num_layers = len(attention.spec.places)
        model.bind_attention(attention.spec, pool.part(0, num_layers))
        self._table = table
        self._tp = tp or TensorParallel.single()
        self._states = None
        if states is not None:
            model.bind_states(states)
            kernels = recurrent_kernels(DeviceFacts.of(table.device))
            self._states = StateTables(states, kernels, table.max_rows, table.device)
        self.vectors = vectors
        self._shifts = None if vectors is None else vectors.shifts
        self.adapters = adapters
        self._adapters = None
        if adapters is not None:
            captured = captures.adapter_graphs is not None
            self._adapters = RowAdapters(table.max_rows, table.device, captured=captured)
        self._builder = BatchBuilder(table, sampling, self._states, vectors, self._adapters)
        self._sampler = rows.sampler
        self._pass = ModelPass(model, attention, table)
        self._masks = MaskStaging(table.max_rows, sampling.vocab_size, table.device)
        self._reader = ResultReader(table.device)
        self._graphs: GraphRunner | None = None
        self._adapter_graphs: GraphRunner | None = None
        self._pieces: PiecewiseRunner | None = None
        self._proposer = proposer
        self._aux_states = no_aux_states if proposer is None else proposer.aux_states
        with torch.inference_mode():
            if longest_prefill is not None:
                model.prepare(graphs.sizes if graphs is not None else (), longest_prefill)
            if proposer is not None:  # before the model's captures, which may include `observe`
                proposer.bind(pool.part(num_layers, len(proposer.places)), self._builder)
                if longest_prefill is not None:
                    proposer.prepare(captures.proposer_graphs, longest_prefill)
            if graphs is not None:
                plain, warm_up = self._decode_plain, partial(self._decode_plain, is_warm_up=True)
                parts = DecodeParts(self._decode_logits, self._decode_sampled)
                steps = DecodeSteps(plain, warm_up, self._decode_extended, parts)
                graphs.capture(steps, self._builder, attention)
                self._graphs = graphs
            if (adapted := captures.adapter_graphs) is not None:
                plain, warm_up = (
                    partial(self._decode_plain, is_warm_up=is_first, adapts=True) for is_first in (False, True)
                )
                adapted.capture(DecodeSteps(plain, warm_up, self._decode_extended), self._builder, attention)
                self._adapter_graphs = adapted
            if pieces is not None:
                inputs, turned = self._builder.prompt_tensors, self._shifts is not None
                images = None if vectors is None else vectors.static_inputs(attention.spec.dtype)
                pieces.capture(model.forward, attention, inputs, self._aux_states, turned=turned, images=images)
                self._pieces = pieces

    @property
    def num_pages(self) -> int:
        """Pages that a scheduler may hand out: ids 1 to num_pages."""
        return self._pool.num_pages

    @property
    def num_state_slots(self) -> int:
        """Slots for states that a scheduler may hand out, from 1 on; 0: the model has no states."""
        return 0 if self._states is None else self._states.pool.num_slots

    @property
    def columns(self) -> ColumnLayout:
        """The pages that a scheduler hands out together, for the same tokens of a row."""
        return self.attention.spec.columns

    @property
    def proposes(self) -> bool:
        """Whether it executes steps of a proposer."""
        return self._proposer is not None

    @property
    def sparse_step_sizes(self) -> tuple[int, ...]:
        """Token counts, ascending, for which long steps with a prefill part are captured; () where none is."""
        return self._pieces.sparse_sizes if self._pieces else ()

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's part of the model and its proposer."""
        parameters = [*self._model.parameters(), *([] if self._proposer is None else self._proposer.parameters())]
        encoder = 0 if self.vectors is None else self.vectors.weight_bytes
        return sum(parameter.nbytes for parameter in parameters) + encoder

    def close(self) -> None:
        """Frees the captured graphs. They may hold collectives, so this comes before the process group is destroyed."""
        captured: list[GraphRunner | PiecewiseRunner | DeviceProposer | None]
        captured = [self._graphs, self._adapter_graphs, self._pieces, self._proposer]
        self._graphs = self._adapter_graphs = self._pieces = None
        for one in captured:
            if one is not None:
                one.close()

    def prepare(self, plan: StepPlan) -> AnyBatch:
        """`build`, then `upload`."""
        return self.upload(self.build(plan))

    def build(self, plan: StepPlan) -> HostBatch:
        """Decides on the host how to execute a step, before anything is on the device."""
        sizes, sampling_sizes = ((), ()) if self._graphs is None else (self._graphs.sizes, self._graphs.sampling_sizes)
        if plan.num_proposed:
            assert self._proposer is not None, "its steps are planned where there is one"
            sizes = self._proposer.graph_sizes
        elif len(plan.draft_tokens) and self._graphs is not None:
            sizes, sampling_sizes = self._graphs.draft_sizes, ()
        return self._builder.build_host(plan, sizes, self._pieces.prompt_sizes if self._pieces else (), sampling_sizes)

    def mirror(self, plan: StepPlan, decisions: StepDecisions) -> AnyBatch:
        """`prepare` on a rank other than 0, as rank 0 decided."""
        return self.upload(self._builder.mirror_host(plan, decisions))

    @torch.inference_mode()
    def upload(self, host: HostBatch) -> AnyBatch:
        """Uploads the plan, brings the row table up to date and plans attention; never waits for the device."""
        for slot, number in host.plan.adapter_loads:
            assert self.adapters is not None, "they are planned where there are some"
            self.adapters.load(slot, number)
        if host.decisions.prompt_size:
            self._builder.send_prompt(host)
            return PromptBatch(host)
        step = self._builder.upload(host)
        if step.cleared_pages is not None:
            self._pool.clear(step.cleared_pages)
        if host.plan.num_proposed:
            return ProposerBatch(step)
        if step.decisions.graph_size and step.decode is not None:
            self._graphs_of(step.decisions).plan_replay(step.decode)
            return Batch(step, None)
        if step.prefill is None and step.decode is None:
            return Batch(step, None)
        return Batch(step, self.attention.plan(step.prefill, step.decode))

    @torch.inference_mode()
    def execute(self, batch: AnyBatch) -> PendingStep | UnsampledStep:
        """Launches the step and returns at once (on the CPU: when it is done).

        A step with grammars is launched up to its logits; `sample` continues once their masks are there.
        """
        images = batch.host.images if isinstance(batch, PromptBatch) else batch.step.images
        if self.vectors is not None and images.encodes:
            self.vectors.encode(images)
        if isinstance(batch, ProposerBatch):
            assert self._proposer is not None, "its steps are planned where there is one"
            proposed = self._proposer.propose(batch.step)
            return self._reader.start(Computed(batch.step, None, None), Sampled(proposed, None))
        if isinstance(batch, PromptBatch):
            step, hidden = self._run_prompt(batch.host)
            computed = self._logits(step, hidden)
            return UnsampledStep(computed) if step.waits_for_masks else self._sample(computed, None)
        step = batch.step
        if step.decisions.graph_size:
            computed = self._replay(step)
        elif batch.attention is None:
            computed = Computed(step, None, None)
        else:
            computed = self._logits(step, self._forward(batch))
        return UnsampledStep(computed) if step.waits_for_masks else self._sample(computed, None)

    def no_masks(self, num_sampled: int) -> GrammarMasks:
        """Masks that allow everything."""
        indices = np.arange(num_sampled, dtype=np.int32)
        return indices, np.full((num_sampled, self._masks.num_words), -1, dtype=np.int32)

    def grammar_bitmask(self, count: int) -> Int32Array:
        """Pinned buffer for `count` grammar bitmask rows, which `sample` uploads without another copy."""
        return self._masks.bitmask_rows(count)

    @torch.inference_mode()
    def sample(self, pending: UnsampledStep, masks: GrammarMasks | None) -> None:
        """Launches the rest of a step with grammars.

        `masks`: (result indices int32 [k], bits int32 [k, ceil(vocab_size / 32)]); None: no row is masked after all.
        """
        assert pending.unsampled is not None, "a step is sampled once"
        pending.begin(self._sample(pending.unsampled, masks))

    def _forward(self, batch: Batch) -> torch.Tensor:
        """The hidden states of the tokens that `_logits_indices` names."""
        plan, logits_indices = batch.attention, self._logits_indices(batch.step)
        assert plan is not None, "only graphs run without an attention plan"
        rows, positions = batch.step.tokens()
        step, vectors = batch.step, self.vectors
        tokens, slots = self._pass.input(rows, positions, self._shifts if step.prefill is None else None)
        if vectors is not None and step.prefill is not None:
            tokens = vectors.shown(tokens, step.images, step.given_rows, step.rope_positions)
        if self._adapters is not None and step.decisions.adapts:
            tokens = self._adapters.given(tokens, rows)
        if self._pieces is None or plan.prefill is None or not self._pieces.serves(tokens):
            return self._hidden_states(rows, tokens, slots, plan, logits_indices=logits_indices)
        hidden = self._pieces.run(tokens, slots, plan)
        self._observe(rows, positions, self._pieces.aux)
        return hidden if logits_indices is None else hidden[logits_indices]

    def _run_prompt(self, host: HostBatch) -> tuple[StepTensors, torch.Tensor]:
        """The step of a single prompt, and the hidden state of its last token, [1, hidden_size]."""
        assert self._pieces is not None, "a prompt's size comes from the captured passes"
        hidden = self._pieces.run_prompt(host.decisions.prompt_size)
        step = self._builder.follow_prompt(host)
        if self._pieces.aux is not None:
            (chunk,) = host.plan.prefill
            positions = torch.arange(chunk.start, chunk.end, dtype=torch.int32, device=self._table.device)
            self._observe(torch.full_like(positions, chunk.row), positions, self._pieces.aux)
        return step, hidden

    def _logits_indices(self, step: StepTensors) -> torch.Tensor | None:
        """The tokens whose hidden states logits are computed from, or that are checked; None: all of them."""
        if step.decisions.prompt_logprobs or step.logits_indices is None:
            return None
        return step.logits_indices

    def _hidden_states(
        self, rows: torch.Tensor, tokens: ModelInput, slots: tuple[torch.Tensor, ...], plan: PairPlan, **fields: Any
    ) -> torch.Tensor:
        """See `ModelPass.run`; rows: of the tokens."""
        aux = self._aux_states(len(rows))
        hidden = self._pass.run(tokens, slots, plan, aux=aux, **fields)
        self._observe(rows, tokens.positions, aux)
        return hidden

    def _observe(self, rows: torch.Tensor, positions: torch.Tensor, aux: AuxStates | None) -> None:
        """Passes tokens, int32 [num_tokens] each, and their `aux` states (may be padded) to an observing proposer."""
        if self._proposer is not None and aux is not None:
            self._proposer.observe(rows, positions, aux.out[: len(rows)])

    def _logits(self, step: StepTensors, hidden: torch.Tensor) -> Computed:
        """From hidden states to logits and the other inputs of sampling."""
        prompt_logprobs = tuple(self._prompt_logprobs(step, hidden))
        if step.logits_indices is not None and self._logits_indices(step) is None:
            hidden = hidden[step.logits_indices]  # otherwise `hidden` only has these
        logits = None
        if step.num_sampled:
            slots = self._slots_of(step, step.sampling.rows)
            logits = self._model.logits(hidden[: step.num_sampled], slots)
        sound, end_of_checked = None, step.num_sampled + len(step.checked_rows)
        if step.checked_rows and self._tp.rank == 0:
            # NaN in a chunk's keys and values also reaches the hidden state of its last token, which attends to all.
            sound = torch.isfinite(hidden[step.num_sampled : end_of_checked]).all(dim=1).to(torch.int32)
        pooled = self._pooled(step, hidden[end_of_checked:]) if step.pooled else None
        return Computed(step, logits, None, sound, prompt_logprobs, pooled)

    def _slots_of(self, step: StepTensors, rows: torch.Tensor) -> torch.Tensor | None:
        """The adapters of these rows, int32 [num_rows]; None: the step has none."""
        return None if self._adapters is None or not step.decisions.adapts else self._adapters.slots_of(rows)

    def _pooled(self, step: StepTensors, states: torch.Tensor) -> Pooled | None:
        model, is_rank_0 = self._model, self._tp.rank == 0

        def logits(hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
            of_rows = torch.tensor(rows, dtype=torch.int32, device=hidden.device)
            return model.logits(hidden, self._slots_of(step, of_rows))

        return pool(step.pooled, states, step.pooled_tokens, logits=logits, scores=model.scores, is_rank_0=is_rank_0)

    def _sample(self, computed: Computed, masks: GrammarMasks | None) -> PendingStep:
        """Launches the rest of a step whose logits are being computed."""
        sampled = self._sample_rows(computed, masks)
        if computed.sound is not None:
            checked = torch.stack([torch.zeros_like(computed.sound), computed.sound])
            sampled = dataclasses.replace(sampled, token_ids=torch.cat([sampled.token_ids, checked], dim=1))
        return self._reader.start(computed, sampled)

    def _sample_rows(self, computed: Computed, masks: GrammarMasks | None) -> Sampled:
        step, logits, token_ids = computed.step, computed.logits, computed.token_ids
        if logits is None:
            return Sampled(self._no_tokens(0), None)
        inputs, packed = step.sampling, None
        if step.drafts is not None and step.decisions.resamples:
            # Bad words read earlier tokens, and the graph has overwritten drafts with what it sampled.
            self._table.write_tokens(*step.drafts)
        if token_ids is not None and step.decisions.sampling_graph:
            self._replay_sampling(step, masks)
        elif token_ids is None or step.decisions.resamples:
            if masks is not None and len(masks[0]):
                index, bits = self._masks.upload(step.num_sampled, *masks)
                inputs = dataclasses.replace(inputs, mask_index=index, mask_bits=bits)
            if self._tp.rank != 0:
                token_ids = self._no_tokens(step.num_sampled) if token_ids is None else token_ids
            elif token_ids is None:
                token_ids = self._sampler.sample(logits, inputs)
            else:  # the graph has sampled the rows that only have a temperature
                self._sampler.sample_extended(logits, inputs, token_ids)
            self._tp.broadcast(token_ids)
            self._table.write_tokens(inputs.rows, inputs.positions, token_ids[0, : step.num_sampled])
        if inputs.logprob_indices is not None and self._tp.rank == 0:
            packed = self._sampler.logprobs(logits, inputs.logprob_indices, token_ids[0], inputs.top_logprobs)
        return Sampled(token_ids, packed)

    def _graphs_of(self, decisions: StepDecisions) -> GraphRunner:
        found = self._adapter_graphs if decisions.adapts else self._graphs
        assert found is not None, "a graph size comes from the graph runner"
        return found

    def _replay(self, step: StepTensors) -> Computed:
        self._reader.protect_outputs()
        outputs = self._graphs_of(step.decisions).replay(step.decisions.graph_size, has_drafts=step.drafts is not None)
        return Computed(step, outputs.logits[: step.num_sampled], outputs.token_ids)

    def _replay_sampling(self, step: StepTensors, masks: GrammarMasks | None) -> None:
        if masks is not None and len(masks[0]):
            self._masks.upload(step.decisions.graph_size, *masks)
        elif step.decisions.sampling_graph & layout.GRAMMAR:
            self._masks.clear()  # the graph reads them
        self._graphs_of(step.decisions).replay_sampling(step.decisions.graph_size, step.decisions.sampling_graph)

    def _decode_plain(
        self, decode: DecodeInputs, plan: PairPlan, is_warm_up: bool = False, adapts: bool = False
    ) -> DecodeOutputs:
        """The whole decode step, as captured: from the token table back into the token table."""
        return self._decode_sampled(decode, self._decode_logits(decode, plan, is_warm_up, adapts))

    def _decode_logits(
        self, decode: DecodeInputs, plan: PairPlan, is_warm_up: bool = False, adapts: bool = False
    ) -> torch.Tensor:
        tokens, slots = self._pass.input(decode.rows, decode.kv_lens - 1, self._shifts)
        if self._adapters is not None and adapts:
            tokens = self._adapters.given(tokens, decode.rows)
        hidden = self._hidden_states(decode.rows, tokens, slots, plan, is_warm_up=is_warm_up, captured=True)
        return self._model.decode_logits(hidden, tokens.by_row)

    def _decode_sampled(self, decode: DecodeInputs, logits: torch.Tensor) -> DecodeOutputs:
        if self._tp.rank == 0:
            token_ids = self._sampler.sample_plain(logits, decode.rows, decode.kv_lens)
        else:
            token_ids = self._no_tokens(decode.batch_size)
        self._tp.share_tokens(token_ids)
        self._table.write_tokens(decode.rows, decode.kv_lens, token_ids[0])
        return DecodeOutputs(logits, token_ids)

    def _decode_extended(self, decode: DecodeInputs, outputs: DecodeOutputs, sampling_graph: int) -> None:
        """Sampling of the rows of a decode step that need more than temperature, as captured."""
        if self._tp.rank == 0:
            masks = self._masks.fixed(decode.batch_size) if sampling_graph & layout.GRAMMAR else (None, None)
            inputs = SamplingInputs(
                rows=decode.rows,
                positions=decode.kv_lens,
                flags=sampling_graph & layout.EXTENDED,
                searches=bool(sampling_graph & layout.SEARCHES),
                mask_index=masks[0],
                mask_bits=masks[1],
            )
            self._sampler.sample_extended(outputs.logits, inputs, outputs.token_ids)
        self._tp.share_tokens(outputs.token_ids)
        self._table.write_tokens(decode.rows, decode.kv_lens, outputs.token_ids[0])

    def _prompt_logprobs(self, step: StepTensors, hidden: torch.Tensor) -> list[torch.Tensor]:
        packed = []
        for request in step.decisions.prompt_logprobs:
            states = hidden[request.first : request.first + request.count]
            # A copy, since kernels are recompiled for pointers that are not aligned to 16 bytes.
            targets = self._table.tokens[request.row, request.position : request.position + request.count].clone()
            # A whole prompt's logits would not fit: 8,192 tokens of a large vocabulary are gigabytes.
            slabs = zip(states.split(logprobs.PROMPT_SLAB), targets.split(logprobs.PROMPT_SLAB), strict=True)
            parts = []
            for slab, ids in slabs:
                slots = self._slots_of(step, torch.full_like(ids, request.row))
                logits = self._model.logits(slab, slots)  # of which each rank computes a part
                if self._tp.rank == 0:
                    every = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
                    parts.append(self._sampler.logprobs(logits, every, ids, request.top))
            if parts:
                packed.append(torch.cat(parts))
        return packed

    def _no_tokens(self, n: int) -> torch.Tensor:
        return torch.zeros(2, n, dtype=torch.int32, device=self._table.device)
