"""Step plans made by hand for the runner's tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from minisgl_backend.request import SamplingParams
from minisgl_backend.step import AdmittedRow, PrefillChunk, StepPlan


@dataclass
class Driver:
    """Turns "admit this", "decode those" into plans, in the simplest way that keeps the rules."""

    page_size: int
    next_step: int = 0
    next_page: int = 1
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by row, the host's view
    computed: dict[int, int] = field(default_factory=dict)  # by row: tokens in the cache
    pages: dict[int, int] = field(default_factory=dict)  # by row: pages it owns
    pending: list[AdmittedRow] = field(default_factory=list)

    def admit(self, row: int, tokens: list[int], params: SamplingParams, prompt_len: int | None = None) -> None:
        """The row's sequence starts with the next plan."""
        ids = np.array(tokens, dtype=np.int32)
        self.tokens[row], self.computed[row], self.pages[row] = list(tokens), 0, 0
        self.pending.append(
            AdmittedRow(
                row=row, uid=row, params=params, prompt_len=prompt_len or len(tokens), token_ids=ids, cached_len=0
            )
        )

    def plan(self, prefill: dict[int, int] | None = None, decode: tuple[int, ...] = ()) -> StepPlan:
        """`prefill`: tokens to compute, by row. `decode`: rows that take one step."""
        chunks, pages = [], []
        for row, count in (prefill or {}).items():
            start = self.computed[row]
            end = start + count
            ids = np.array(self.tokens[row][start:end], dtype=np.int32)
            chunks.append(PrefillChunk(row=row, start=start, token_ids=ids, samples=end == len(self.tokens[row])))
            self.computed[row] = end
            pages += self._grow(row)
        for row in decode:
            self.computed[row] += 1
            pages += self._grow(row)
        admitted, self.pending = tuple(self.pending), []
        self.next_step += 1
        columns = np.array(pages, dtype=np.int32).reshape(-1, 3).T
        return StepPlan(
            step=self.next_step,
            admitted=admitted,
            page_rows=columns[0],
            page_columns=columns[1],
            page_ids=columns[2],
            prefill=tuple(chunks),
            decode_rows=np.array(decode, dtype=np.int32),
            decode_lengths=np.array([self.computed[row] for row in decode], dtype=np.int32),
            decode_uids=np.array(decode, dtype=np.int64),
        )

    def commit(self, plan: StepPlan, token_ids: np.ndarray) -> None:
        for row, token in zip(plan.sampled_rows.tolist(), token_ids.tolist(), strict=True):
            self.tokens[row].append(token)

    def _grow(self, row: int) -> list[tuple[int, int, int]]:
        new = []
        while self.pages[row] * self.page_size < self.computed[row]:
            new.append((row, self.pages[row], self.next_page))
            self.pages[row] += 1
            self.next_page += 1
        return new
