"""From a step plan to device tensors: `build_host` on the host, `upload` to the device.

The host part is vectorised in NumPy, with loops only over the few admitted sequences and prefill chunks of a step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import replace

import numpy as np
import torch
from msgspec.structs import replace as replace_fields

from minisgl_backend.arrays import NO_INT32, Int32Array
from minisgl_backend.attention.base import DecodeInputs, PrefillInputs
from minisgl_backend.attention.pieces import cut
from minisgl_backend.request import PoolingParams
from minisgl_backend.runner.graphs.pieces import piece_size
from minisgl_backend.runner.graphs.single_prompt import PromptLayout, PromptTensors
from minisgl_backend.runner.plan_arrays import (
    PrefillHost,
    admitted_arrays,
    expand,
    params_of,
    prefill_arrays,
    prefill_inputs,
    sampled_beside_prefill,
    sampled_of_prompt,
)
from minisgl_backend.runner.pooling import PooledChunk, named_tokens, pooled_chunks
from minisgl_backend.runner.row_adapters import RowAdapters
from minisgl_backend.runner.row_images import NO_IMAGES
from minisgl_backend.runner.row_table import RowTable
from minisgl_backend.runner.staging import Staging
from minisgl_backend.runner.states import StateTables
from minisgl_backend.runner.step_tensors import HostBatch, PenaltyReset, StepTensors
from minisgl_backend.runner.vectors import Vectors
from minisgl_backend.sampling.metadata import NOTHING, SamplingMetadata, SamplingRows
from minisgl_backend.step import RowError, StepDecisions, StepPlan


class BatchBuilder:
    """Builds batches for one row table. Plans must come in order, and each be executed before the next is uploaded."""

    def __init__(
        self,
        table: RowTable,
        sampling: SamplingRows,
        states: StateTables | None = None,
        vectors: Vectors | None = None,
        adapters: RowAdapters | None = None,
    ) -> None:
        """states: of a model with states; vectors: of a model that sees; adapters: where rows may have some."""
        self._vectors, self._adapters = vectors, adapters
        self._table = table
        self._states = states
        self._sampling = sampling
        self._splits_pages = table.columns.kernel_pages > 1
        self._poolings: dict[int, PoolingParams] = {}  # by row, for pooling requests
        self._needs_penalty_recount: set[int] = (
            set()
        )  # rows whose penalties may have counted tokens sampled after rejected drafts
        self._prompts = PromptLayout(table.page_size, table.max_pages_per_row, table.num_groups)
        self.staging = Staging(table.max_rows, table.device)

    def build_host(
        self,
        plan: StepPlan,
        graph_sizes: Sequence[int] = (),
        prompt_sizes: Sequence[int] = (),
        sampling_sizes: Container[int] = (),
    ) -> HostBatch:
        """All host decisions of a step: what the sampler needs, padding, the filled staging buffer.

        `graph_sizes`: decode batch sizes that have a captured graph, ascending; `prompt_sizes`: token counts of single
        prompts that have one, ascending; `sampling_sizes`: those of `graph_sizes` that have sampling graphs. Raises
        RowError where a request cannot be served after all, before anything happens on the device or another rank.
        """
        images = NO_IMAGES if self._vectors is None else self._vectors.rows.build(plan)
        host = self._built(plan, graph_sizes, prompt_sizes, sampling_sizes)
        return host if images is NO_IMAGES else replace_fields(host, images=images)

    def _built(
        self,
        plan: StepPlan,
        graph_sizes: Sequence[int],
        prompt_sizes: Sequence[int],
        sampling_sizes: Container[int],
    ) -> HostBatch:
        """Without what its images ask for."""
        if self._splits_pages and len(plan.page_ids):
            plan = self._in_kernel_pages(plan)
        if plan.num_proposed:
            return self._build_proposing(plan, graph_sizes)
        if self._adapters is not None:
            self._adapters.admit(plan)
        for admitted in plan.admitted:
            try:
                self._sampling.admit(admitted)
            except Exception as error:
                raise RowError(admitted.row, error) from error
            self._poolings.pop(admitted.row, None)
            self._needs_penalty_recount.discard(admitted.row)
            if admitted.pooling is not None:
                self._poolings[admitted.row] = admitted.pooling
        penalised = tuple(
            PenaltyReset(admitted.row, len(admitted.token_ids), admitted.prompt_len)
            for admitted in plan.admitted
            if admitted.params.has_penalties
        )
        if plan.is_retry or self._needs_penalty_recount:
            penalised += self._recounts(plan)
        if len(plan.draft_tokens):
            drafted = set(plan.decode_rows[plan.draft_tokens >= 0].tolist())
            self._needs_penalty_recount |= {row for row in drafted if self._sampling.penalised_prompt(row)}
        if prompt_sizes and self._serves_prompt(plan):
            needs = self._sampling.metadata_of(plan, sampled_of_prompt(plan)[0])
            prompt_size = piece_size(len(plan.prefill[0].token_ids), prompt_sizes)
            if prompt_size and not needs.prompt_logprobs:  # which need the hidden states of all tokens
                return self._stage_prompt(plan, StepDecisions(prompt_size=prompt_size), needs, penalised)
        prefill = prefill_arrays(plan) if plan.prefill else None
        sampled = _sampled(plan, prefill)
        needs = self._sampling.metadata_of(plan, sampled[0])
        adapts = self._adapters is not None and self._adapters.are_in(plan)
        if adapts and self._adapters is not None and not self._adapters.captured:
            graph_sizes = ()
        size = 0 if prefill is not None else graph_size(len(plan.decode_rows), graph_sizes)
        decisions = StepDecisions(
            graph_size=size,
            resamples=size > 0 and needs.extended,
            sampling_graph=needs.sampling_graph if size in sampling_sizes else 0,
            prompt_logprobs=needs.prompt_logprobs,
            adapts=adapts,
        )
        return self._stage(plan, prefill, sampled, decisions, needs, penalised)

    def _serves_prompt(self, plan: StepPlan) -> bool:
        """Whether the captured pass of a single prompt may serve the plan."""
        if not self._prompts.serves(plan) or plan.prefill[0].pools:
            return False
        if self._adapters is not None and self._adapters.has(plan.prefill[0].row):
            return False
        return self._vectors is None or self._vectors.rows.is_plain(plan.prefill[0].row)

    def _build_proposing(self, plan: StepPlan, graph_sizes: Sequence[int]) -> HostBatch:
        """A step of the proposer, which leaves the sampling state of the model unchanged."""
        prefill = prefill_arrays(plan) if plan.prefill else None
        size = 0 if prefill is not None else graph_size(len(plan.decode_rows), graph_sizes)
        return self._stage(plan, prefill, _sampled(plan, prefill), StepDecisions(graph_size=size), NOTHING, ())

    def _recounts(self, plan: StepPlan) -> tuple[PenaltyReset, ...]:
        """Resets for the decoding rows whose penalties may have counted rejected tokens."""
        rows, lengths = plan.decode_rows, plan.decode_lengths
        if len(plan.draft_tokens):
            first = plan.draft_tokens < 0
            rows, lengths = rows[first], lengths[first]
        resets = []
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            prompt_len = self._sampling.penalised_prompt(row)
            if prompt_len and (plan.is_retry or row in self._needs_penalty_recount):
                resets.append(PenaltyReset(row, length, prompt_len))
                self._needs_penalty_recount.discard(row)
        return tuple(resets)

    def mirror_host(self, plan: StepPlan, decisions: StepDecisions) -> HostBatch:
        """`build_host` on other ranks: they follow rank 0's decisions, and need nothing for sampling."""
        images = NO_IMAGES if self._vectors is None else self._vectors.rows.build(plan)
        if self._splits_pages and len(plan.page_ids):
            plan = self._in_kernel_pages(plan)
        if self._adapters is not None:
            self._adapters.admit(plan)
        if decisions.prompt_size:
            return replace_fields(self._stage_prompt(plan, decisions, NOTHING, ()), images=images)
        prefill = prefill_arrays(plan) if plan.prefill else None
        host = self._stage(plan, prefill, _sampled(plan, prefill), decisions, NOTHING, ())
        return replace_fields(host, images=images)

    def _in_kernel_pages(self, plan: StepPlan) -> StepPlan:
        """With the entries of attention's page tables instead of the pages of rows' columns."""
        columns = self._table.columns
        groups, rows, places, pages = columns.kernel_entries(
            plan.page_groups, plan.page_rows, plan.page_columns, plan.page_ids
        )
        return replace_fields(plan, page_groups=groups, page_rows=rows, page_columns=places, page_ids=pages)

    def _stage_prompt(
        self, plan: StepPlan, decisions: StepDecisions, needs: SamplingMetadata, penalised: tuple[PenaltyReset, ...]
    ) -> HostBatch:
        rows, positions = sampled_of_prompt(plan)
        (admitted,), (chunk,) = plan.admitted, plan.prefill
        arrays: dict[str, Int32Array] = {
            "prompt": self._prompts.pack(plan, decisions.prompt_size),  # the first: its address is the graph's
            "sampled_rows": rows,
            "sampled_positions": positions,
            "admitted_params": params_of(admitted, self._sampling.vocab_size),
            "admitted_tokens": admitted.token_ids,
        }
        if self._adapters is not None:
            arrays |= self._adapters.arrays(plan)
        return HostBatch(
            plan=plan,
            staged=self.staging.fill(NO_INT32, NO_INT32, arrays | needs.arrays),
            num_sampled=len(rows),
            checked_rows=() if chunk.samples else (chunk.row,),
            decisions=decisions,
            needs=needs,
            penalised=penalised,
        )

    def _stage(
        self,
        plan: StepPlan,
        prefill: PrefillHost | None,
        sampled: tuple[Int32Array, Int32Array, Int32Array],
        decisions: StepDecisions,
        needs: SamplingMetadata,
        penalised: tuple[PenaltyReset, ...],
    ) -> HostBatch:
        rows, positions, indices = sampled
        arrays = _update_arrays(plan, self._sampling.vocab_size, self._table.max_rows)
        if self._states is not None and not plan.num_proposed:
            arrays |= self._states.arrays(plan)
        if self._adapters is not None:
            arrays |= self._adapters.arrays(plan)
        checked_rows: tuple[int, ...] = ()
        pooled: tuple[PooledChunk, ...] = ()
        if prefill is not None:
            ends_inside = np.array([not chunk.samples for chunk in plan.prefill], dtype=bool)
            checked_rows = tuple(prefill.rows[ends_inside].tolist())
            checked = prefill.cu_seqlens[1:][ends_inside] - 1
            states: list[Int32Array] = []
            if any(chunk.pools for chunk in plan.prefill):
                pooled, states = pooled_chunks(plan, self._poolings, prefill.cu_seqlens[:-1])
                if len(named := named_tokens(pooled)):
                    arrays["pooled_tokens"] = named
            token_rows, token_positions = expand(prefill.rows, prefill.starts, prefill.lengths)
            arrays |= {
                "token_rows": np.concatenate([token_rows, plan.decode_rows]),
                "token_positions": np.concatenate([token_positions, plan.decode_lengths - 1]),
                "prefill_rows": prefill.rows,
                "prefill_ends": prefill.ends,
                "cu_seqlens": prefill.cu_seqlens,
                "sampled_rows": rows,
                "sampled_positions": positions,
                "logits_indices": np.concatenate([indices, checked, *states]),
            }
        if self._vectors is not None:
            arrays |= self._vectors.rows.arrays(plan, prefill)
        arrays |= needs.arrays
        decode_rows, decode_lengths = self._padded(plan.decode_rows, plan.decode_lengths, decisions.graph_size)
        return HostBatch(
            plan=plan,
            staged=self.staging.fill(decode_rows, decode_lengths, arrays),
            prefill=prefill,
            decode_rows=decode_rows,
            decode_lengths=decode_lengths,
            num_sampled=len(rows),
            checked_rows=checked_rows,
            decisions=decisions,
            pooled=pooled,
            needs=needs,
            penalised=penalised,
        )

    def upload(self, host: HostBatch) -> StepTensors:
        """Uploads a built batch and brings the row table up to date; never waits for the device."""
        arrays = self.staging.upload(host.staged)
        if self._states is not None:
            self._states.apply(host.plan.step, arrays)
        if self._adapters is not None:
            self._adapters.apply(host.plan, arrays)
        self._apply(host, arrays)
        prefill = host.prefill
        batch = len(host.decode_rows)
        rows, positions = self.staging.rows[: host.num_sampled], self.staging.lengths[: host.num_sampled]
        if prefill is not None:
            rows, positions = arrays["sampled_rows"], arrays["sampled_positions"]
        return StepTensors(
            plan=host.plan,
            decisions=host.decisions,
            num_sampled=host.num_sampled,
            checked_rows=host.checked_rows,
            prefill=self._prefill_inputs(host.plan, prefill, arrays) if prefill is not None else None,
            decode=self._decode_part(host) if batch else None,
            drafts=_drafts(arrays) if len(host.plan.draft_tokens) else None,
            token_rows=arrays.get("token_rows"),
            token_positions=arrays.get("token_positions"),
            logits_indices=arrays.get("logits_indices"),
            pooled=host.pooled,
            pooled_tokens=arrays.get("pooled_tokens"),
            cleared_pages=arrays.get("cleared_pages"),
            images=host.images,
            given_rows=arrays.get("given_rows"),
            rope_positions=arrays.get("rope_positions"),
            sampling=self._sampling.inputs_of(host.needs, rows, positions, arrays),
            waits_for_masks=host.needs.waits_for_masks,
            logprobs=host.needs.logprobs,
        )

    def send_prompt(self, host: HostBatch) -> None:
        """Uploads a single prompt for its captured pass, which may be launched then; `follow_prompt` comes next."""
        self.staging.send(host.staged)

    def follow_prompt(self, host: HostBatch) -> StepTensors:
        """Updates the row table after a captured pass, which does not read it."""
        arrays, (admitted,) = self.staging.arrays(host.staged), host.plan.admitted
        num_pages = len(host.plan.page_ids) // self._table.num_groups
        pages = self._prompts.pages(arrays["prompt"], host.decisions.prompt_size, num_pages)
        self._table.admit(admitted.row, pages, arrays["admitted_tokens"], arrays["admitted_params"])
        if self._vectors is not None:
            self._vectors.admit_plain(admitted.row)
        if self._adapters is not None:
            self._adapters.apply(host.plan, arrays)
        self._reset_sampling(host)
        return StepTensors(
            plan=host.plan,
            decisions=host.decisions,
            num_sampled=host.num_sampled,
            checked_rows=host.checked_rows,
            images=host.images,
            sampling=self._sampling.inputs_of(host.needs, arrays["sampled_rows"], arrays["sampled_positions"], arrays),
            waits_for_masks=host.needs.waits_for_masks,
            logprobs=host.needs.logprobs,
        )

    def prompt_tensors(self, size: int) -> PromptTensors:
        """Inputs of the captured pass of a single prompt of up to `size` tokens, filled for the capture: one token on
        the padding page."""
        words = self.staging.first(self._prompts.num_words(size))
        words.copy_(torch.from_numpy(self._prompts.padding(size)))
        return self._prompts.views(words, size)

    def decode_inputs(self, rows: Int32Array, lengths: Int32Array) -> DecodeInputs:
        """The decode part whose rows and lengths are (or will be) uploaded; also what graphs are captured with."""
        return DecodeInputs(
            kv_lens=self.staging.lengths[: len(rows)],
            rows=self.staging.rows[: len(rows)],
            page_table=self._table.page_table,
            kv_lens_host=lengths,
            rows_host=rows,
            page_tables=self._table.page_tables,
            states=None if self._states is None else self._states.rows,
        )

    def _decode_part(self, host: HostBatch) -> DecodeInputs:
        inputs = self.decode_inputs(host.decode_rows, host.decode_lengths)
        sees_others = len(host.plan.draft_tokens) or len(host.plan.decode_rows) > host.plan.num_proposing > 0
        return replace(inputs, has_drafts=True) if sees_others else inputs

    def padded_inputs(self, rows: Int32Array, lengths: Int32Array, size: int) -> DecodeInputs:
        """As `decode_inputs`, padded to `size` entries; `pad` fills the padding on the device."""
        return self.decode_inputs(*self._padded(rows, lengths, size))

    def pad(self, count: int) -> None:
        """Makes the entries of the decode part after the first `count` padding, on the device."""
        self.staging.rows[count:].fill_(self._table.padding_row)
        self.staging.lengths[count:].fill_(1)

    def padding_inputs(self, size: int) -> DecodeInputs:
        """A decode part that is all padding, with the staging buffer filled accordingly, to capture graphs with."""
        rows = np.full(size, self._table.padding_row, dtype=np.int32)
        self.staging.rows.fill_(self._table.padding_row)
        self.staging.lengths.fill_(1)
        return self.decode_inputs(rows, np.ones(size, dtype=np.int32))

    def _apply(self, host: HostBatch, arrays: dict[str, torch.Tensor]) -> None:
        if len(host.plan.draft_tokens):
            self._table.write_tokens(*_drafts(arrays))
        if "page_ids" not in arrays and not host.plan.admitted and not host.penalised:
            return
        self._table.apply(arrays)
        if self._vectors is not None and "rope_shifts" in arrays:
            self._vectors.admit(arrays["admitted_rows"], arrays["rope_shifts"])
        self._reset_sampling(host)

    def _reset_sampling(self, host: HostBatch) -> None:
        for reset in host.penalised:
            tokens = self._table.tokens[reset.row, : reset.num_tokens]
            self._sampling.penalties.reset(reset.row, tokens, reset.prompt_len)
        self._sampling.rules.upload()

    def _prefill_inputs(self, plan: StepPlan, prefill: PrefillHost, arrays: dict[str, torch.Tensor]) -> PrefillInputs:
        inputs = prefill_inputs(self._table, prefill, arrays)
        if self._vectors is None or self._vectors.bidirectional == "none":
            return inputs
        spans = self._vectors.rows.spans(plan)
        if not any(spans):
            return inputs
        return replace(inputs, pieces=cut(inputs, spans), whole_windowless=self._vectors.bidirectional == "windows")

    def _padded(self, rows: Int32Array, lengths: Int32Array, size: int) -> tuple[Int32Array, Int32Array]:
        missing = size - len(rows)
        if missing <= 0:
            return rows, lengths
        # Padding entries decode the first token of the padding row: one token in its cache, on the padding page.
        rows = np.concatenate([rows, np.full(missing, self._table.padding_row, dtype=np.int32)])
        return rows, np.concatenate([lengths, np.ones(missing, dtype=np.int32)])


def _sampled(plan: StepPlan, prefill: PrefillHost | None) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Row, position and index into the hidden states of every token to be sampled, in result order; no index stands for
    all of them."""
    if prefill is None:
        return plan.decode_rows, plan.decode_lengths, NO_INT32
    return sampled_beside_prefill(plan, prefill)


def _update_arrays(plan: StepPlan, vocab_size: int, max_rows: int) -> dict[str, Int32Array]:
    """What a plan changes of rows and pages, by name; names without entries are left out."""
    arrays: dict[str, Int32Array] = {}
    if len(plan.cleared_pages):
        arrays["cleared_pages"] = plan.cleared_pages
    if len(plan.draft_tokens):
        drafts = plan.draft_tokens >= 0
        arrays |= {
            "draft_rows": plan.decode_rows[drafts],
            "draft_positions": plan.decode_lengths[drafts] - 1,
            "draft_tokens": plan.draft_tokens[drafts],
        }
    if len(plan.page_ids):
        rows = plan.page_groups * max_rows + plan.page_rows if len(plan.page_groups) else plan.page_rows
        arrays |= {"page_rows": rows, "page_columns": plan.page_columns, "page_ids": plan.page_ids}
    if plan.admitted:
        arrays |= admitted_arrays(plan, vocab_size)
    return arrays


def _drafts(arrays: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return arrays["draft_rows"], arrays["draft_positions"], arrays["draft_tokens"]


def graph_size(batch: int, graph_sizes: Sequence[int]) -> int:
    """The smallest captured size that holds the batch; 0 where there is none."""
    index = bisect_left(graph_sizes, batch) if batch and len(graph_sizes) else len(graph_sizes)
    return int(graph_sizes[index]) if index < len(graph_sizes) else 0
