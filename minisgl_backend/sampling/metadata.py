"""What each row asks of the sampler, kept on the host: a step's needs are known without asking the device.

Written when a row is admitted, read by whole-array operations in every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from minisgl_backend.arrays import Int32Array
from minisgl_backend.kernels.sampling import layout
from minisgl_backend.kernels.sampling.inputs import SampledRows
from minisgl_backend.sampling.logits_processors import TokenRules
from minisgl_backend.sampling.params import flags_of
from minisgl_backend.sampling.penalties import PenaltyCounts
from minisgl_backend.step import AdmittedRow, PromptLogprobsRequest, StepPlan, Wants

GrammarMasks = tuple[Int32Array, Int32Array]  # result indices [k], bits [k, ceil(vocab_size / 32)]

OFF = -1  # in the logprobs columns


@dataclass(frozen=True, kw_only=True)
class SamplingInputs(SampledRows):
    """The rows that sample in one step and their needs, decided on the host."""

    logprob_indices: torch.Tensor | None = None  # int32 [k]  result indices of rows that want log-probabilities
    top_logprobs: int = 0  # the most alternatives that any of them asked for
    # Result indices, int32 [k] each, of the rounds that are sampled one after the other; together they are all of them.
    # A row with penalties and drafts has several entries, and each counts the tokens before it. (): one round.
    rounds: tuple[torch.Tensor, ...] = ()

    @property
    def extended(self) -> bool:
        """False where temperature alone decides: such steps are sampled inside a captured graph."""
        return bool(self.flags & layout.EXTENDED)


class SamplingMetadata(msgspec.Struct, frozen=True):
    """One step's needs, on the host. The caller uploads the index arrays under the names that they have in `arrays`."""

    flags: int
    searches: bool
    top_logprobs: int
    arrays: dict[str, Int32Array]
    logprobs: tuple[tuple[int, int], ...]  # result index, number of alternatives asked for
    prompt_logprobs: tuple[PromptLogprobsRequest, ...]
    num_rounds: int = 0  # see SamplingInputs.rounds; `arrays` has them by the names round_0, round_1, ...

    @property
    def extended(self) -> bool:
        """False where temperature alone decides: such steps are sampled inside a captured graph."""
        return bool(self.flags & layout.EXTENDED)

    @property
    def sampling_graph(self) -> int:
        """The one of sampling.layout.SAMPLING_GRAPHS that serves these rows; 0 where temperature alone decides."""
        edits = layout.EDITS if self.flags & layout.EDITS else 0
        if not self.flags & layout.RANKED:
            return edits | (self.flags & layout.USES_MIN_P)
        return edits | layout.RANKED | (layout.SEARCHES if self.searches else 0)

    @property
    def waits_for_masks(self) -> bool:
        """True where a grammar restricts the tokens; its masks are needed only after the forward pass."""
        return bool(self.flags & layout.GRAMMAR)


NOTHING = SamplingMetadata(flags=0, searches=False, top_logprobs=0, arrays={}, logprobs=(), prompt_logprobs=())


class SamplingRows:
    """The sampling columns of every row."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        max_seq_len: int,
        device: torch.device,
    ) -> None:
        self.penalties = PenaltyCounts(max_rows, vocab_size, device)
        self.rules = TokenRules(max_rows, eos_token_ids, max_seq_len, device)
        self.vocab_size = vocab_size
        self._flags = np.zeros(max_rows, dtype=np.int32)
        self._searches = np.zeros(max_rows, dtype=np.bool_)
        self._logprobs = np.full(max_rows, OFF, dtype=np.int32)
        self._prompt_logprobs = np.full(max_rows, OFF, dtype=np.int32)
        self._prompt_len = np.zeros(max_rows, dtype=np.int32)
        self._decoding: tuple[Int32Array | None, SamplingMetadata] = None, NOTHING  # last decode step: rows, needs

    def admit(self, admitted: AdmittedRow) -> None:
        """Replaces what the row's earlier request asked for."""
        row, params = admitted.row, admitted.params
        self._decoding = None, NOTHING
        flags = flags_of(params, self.vocab_size)
        self._flags[row] = flags
        top_k = params.top_k if params.top_k < self.vocab_size else 0
        self._searches[row] = flags & layout.RANKED and not layout.is_complete(top_k, self.vocab_size)
        self._logprobs[row] = OFF if params.logprobs is None else params.logprobs
        self._prompt_logprobs[row] = OFF if params.prompt_logprobs is None else params.prompt_logprobs
        self._prompt_len[row] = admitted.prompt_len
        if flags & layout.RULES:
            self.rules.admit(row, params, admitted.prompt_len)

    def penalised_prompt(self, row: int) -> int:
        """Number of prompt tokens of a row with penalties; 0 for others."""
        return int(self._prompt_len[row]) if self._flags[row] & layout.PENALTIES else 0

    def metadata_of(self, plan: StepPlan, rows: Int32Array) -> SamplingMetadata:
        """The needs of a plan's sampled `rows` [n]."""
        if plan.prefill or len(plan.draft_tokens):
            return self._metadata_of(plan, rows)
        # While the same rows decode, successive plans hold the same array object.
        if rows is not self._decoding[0]:
            self._decoding = rows, self._metadata_of(plan, rows)
        return self._decoding[1]

    def _metadata_of(self, plan: StepPlan, rows: Int32Array) -> SamplingMetadata:
        flags = self._flags.take(rows)
        union = int(np.bitwise_or.reduce(flags)) if len(flags) else 0
        arrays: dict[str, Int32Array] = {}
        requested: tuple[tuple[int, int], ...] = ()
        top_logprobs = 0
        if union & layout.LOGPROBS:
            indices = np.flatnonzero(flags & layout.LOGPROBS).astype(np.int32)
            alternatives = self._logprobs[rows[indices]]
            arrays["logprob_indices"] = indices
            top_logprobs = int(alternatives.max())
            requested = tuple(zip(indices.tolist(), alternatives.tolist(), strict=True))
        rounds = self._rounds(plan, flags) if len(plan.draft_tokens) and union & layout.PENALTIES else []
        arrays |= {f"round_{number}": indices for number, indices in enumerate(rounds)}
        return SamplingMetadata(
            flags=union,
            searches=bool(union & layout.RANKED and self._searches[rows].any()),
            top_logprobs=top_logprobs,
            arrays=arrays,
            logprobs=requested,
            prompt_logprobs=self._prompt_requests(plan) if plan.prefill else (),
            num_rounds=len(rounds),
        )

    def inputs_of(
        self, needs: SamplingMetadata, rows: torch.Tensor, positions: torch.Tensor, uploaded: dict[str, torch.Tensor]
    ) -> SamplingInputs:
        """`needs` on the device; `uploaded` has the arrays of `needs` by name."""
        return SamplingInputs(
            rows=rows,
            positions=positions,
            flags=needs.flags,
            searches=needs.searches,
            top_logprobs=needs.top_logprobs,
            logprob_indices=uploaded.get("logprob_indices"),
            rounds=tuple(uploaded[f"round_{number}"] for number in range(needs.num_rounds)),
        )

    def _rounds(self, plan: StepPlan, flags: Int32Array) -> list[Int32Array]:
        """The result indices of each round, where rows with penalties have drafts; [] where none has."""
        index = np.arange(len(plan.draft_tokens))
        offsets = np.zeros(len(flags), dtype=np.int32)
        first = np.maximum.accumulate(np.where(plan.draft_tokens < 0, index, 0))
        offsets[len(flags) - len(index) :] = index - first
        offsets[flags & layout.PENALTIES == 0] = 0
        if not offsets.any():
            return []
        return [np.flatnonzero(offsets == offset).astype(np.int32) for offset in range(int(offsets.max()) + 1)]

    def _prompt_requests(self, plan: StepPlan) -> tuple[PromptLogprobsRequest, ...]:
        requests, first = [], 0
        for chunk in plan.prefill:
            top = int(self._prompt_logprobs[chunk.row])
            # The hidden state of position p predicts position p + 1, which must still belong to the client's prompt.
            count = min(chunk.end, int(self._prompt_len[chunk.row]) - 1) - chunk.start
            if top != OFF and chunk.wants & Wants.PROMPT_LOGPROBS and count > 0:
                requests.append(PromptLogprobsRequest(chunk.row, first, chunk.start + 1, count, top))
            first += len(chunk.token_ids)
        return tuple(requests)
