"""What each row asks of the sampler, on the host: enough to decide what a step needs without asking the device.

Written when a row is admitted, read by whole-array operations in every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from minisgl_backend.runner.logits_processors import TokenRules
from minisgl_backend.runner.penalties import PenaltyCounts
from minisgl_backend.runner.row_table import is_greedy
from minisgl_backend.runner.sampler import SamplingInputs
from minisgl_backend.step import AdmittedRow, PromptLogprobsRequest, StepPlan

Int32Array = npt.NDArray[np.int32]
GrammarMasks = tuple[Int32Array, Int32Array]  # result indices [k], bits [k, ceil(vocab_size / 32)]

# Bits of `SamplingRows.needs`.
RANDOM, MIN_P, RANKED, PENALTIES, LOGPROBS, PROMPT_LOGPROBS = (1 << bit for bit in range(6))
OFF = -1  # in the logprobs columns


@dataclass(frozen=True)
class SamplingMetadata:
    """What one step needs, on the host; index arrays are to be uploaded by the names they have in `arrays`."""

    random: bool
    min_p: bool
    ranked_width: int
    rules: bool
    top_logprobs: int
    arrays: dict[str, Int32Array]
    logprobs: tuple[tuple[int, int], ...]  # result index and alternatives wanted
    prompt_logprobs: tuple[PromptLogprobsRequest, ...]

    @property
    def plain(self) -> bool:
        """True where temperature alone decides, as `SamplingInputs.plain` has it."""
        return not (self.min_p or self.rules or self.arrays)


class SamplingRows:
    """The sampling columns of every row."""

    def __init__(self, max_rows: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self.penalties = PenaltyCounts(max_rows, vocab_size, device)
        self.rules = TokenRules(max_rows, eos_token_ids, device)
        self._vocab_size = vocab_size
        self._needs = np.zeros(max_rows, dtype=np.uint8)
        self._top_k = np.zeros(max_rows, dtype=np.int32)
        self._logprobs = np.full(max_rows, OFF, dtype=np.int32)
        self._prompt_logprobs = np.full(max_rows, OFF, dtype=np.int32)
        self._prompt_len = np.zeros(max_rows, dtype=np.int32)

    def admit(self, admitted: AdmittedRow) -> None:
        """Forgets what the row asked before."""
        row, params = admitted.row, admitted.params
        needs = 0
        if not is_greedy(params):
            truncated = 0 < params.top_k < self._vocab_size
            needs |= RANDOM
            needs |= MIN_P if params.min_p > 0 else 0
            needs |= RANKED if truncated or params.top_p < 1 else 0
            self._top_k[row] = params.top_k if truncated else self._vocab_size
        needs |= PENALTIES if params.has_penalties else 0
        needs |= LOGPROBS if params.logprobs is not None else 0
        needs |= PROMPT_LOGPROBS if params.prompt_logprobs is not None else 0
        self._needs[row] = needs
        self._logprobs[row] = OFF if params.logprobs is None else params.logprobs
        self._prompt_logprobs[row] = OFF if params.prompt_logprobs is None else params.prompt_logprobs
        self._prompt_len[row] = admitted.prompt_len
        self.penalties.assign(row, params.has_penalties)
        self.rules.admit(row, params, admitted.prompt_len)

    def metadata_of(
        self, plan: StepPlan, rows: Int32Array, positions: Int32Array, masks: GrammarMasks | None
    ) -> SamplingMetadata:
        """For the sampled `rows` and `positions` [n] of a plan."""
        needs = self._needs[rows]
        union = int(np.bitwise_or.reduce(needs)) if len(needs) else 0
        arrays: dict[str, Int32Array] = {}
        wanted: tuple[tuple[int, int], ...] = ()
        ranked_width = top_logprobs = 0
        if union & RANKED:
            ranked = _lines(needs, RANKED)
            arrays["ranked"] = ranked
            ranked_width = int(self._top_k[rows[ranked]].max())
        if union & PENALTIES:
            penalised = _lines(needs, PENALTIES)
            arrays["penalised"] = penalised
            arrays["penalty_lines"] = self.penalties.lines(rows[penalised])
        if union & LOGPROBS:
            lines = _lines(needs, LOGPROBS)
            alternatives = self._logprobs[rows[lines]]
            arrays["logprobs"] = lines
            top_logprobs = int(alternatives.max())
            wanted = tuple(zip(lines.tolist(), alternatives.tolist(), strict=True))
        if masks is not None and len(masks[0]):
            arrays["masked"], arrays["mask_bits"] = masks
        return SamplingMetadata(
            random=bool(union & RANDOM),
            min_p=bool(union & MIN_P),
            ranked_width=ranked_width,
            rules=self.rules.any and bool((positions < self.rules.until[rows]).any()),
            top_logprobs=top_logprobs,
            arrays=arrays,
            logprobs=wanted,
            prompt_logprobs=self._prompt_requests(plan) if plan.prefill else (),
        )

    def inputs_of(
        self, needs: SamplingMetadata, rows: torch.Tensor, positions: torch.Tensor, uploaded: dict[str, torch.Tensor]
    ) -> SamplingInputs:
        """The same on the device, where `uploaded` has the arrays of `needs` by name."""
        return SamplingInputs(
            rows=rows,
            positions=positions,
            random=needs.random,
            min_p=needs.min_p,
            ranked_width=needs.ranked_width,
            rules=self.rules.table() if needs.rules else None,
            top_logprobs=needs.top_logprobs,
            **{name: uploaded[name] for name in needs.arrays},
        )

    def _prompt_requests(self, plan: StepPlan) -> tuple[PromptLogprobsRequest, ...]:
        requests, first = [], 0
        for chunk in plan.prefill:
            top = int(self._prompt_logprobs[chunk.row])
            # The hidden state of position p predicts position p + 1, which must still be the client's prompt.
            count = min(chunk.end, int(self._prompt_len[chunk.row]) - 1) - chunk.start
            if top != OFF and count > 0:
                requests.append(PromptLogprobsRequest(chunk.row, first, chunk.start + 1, count, top))
            first += len(chunk.token_ids)
        return tuple(requests)


def _lines(needs: npt.NDArray[np.uint8], bit: int) -> Int32Array:
    return np.flatnonzero(needs & bit).astype(np.int32)
