"""Step plans made by hand for the runner's tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from minisgl_backend.request import SamplingParams
from minisgl_backend.runner.async_output import UnsampledStep
from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.step import AdmittedRow, PrefillChunk, StepPlan, Wants
from tests.sampling_cases import OPTIONS

# Among them they need each of SAMPLING_GRAPHS, where the vocabulary is large enough for a search.
EVERY_WISH = [
    msgspec.structs.replace(wish, seed=seed)
    for seed, wish in enumerate(
        (SamplingParams(temperature=1.5, min_p=0.1, presence_penalty=1.0), *OPTIONS.values()), start=1
    )
]


@dataclass
class Driver:
    """Turns "admit this", "decode those" into plans, in the simplest way that keeps the rules."""

    page_size: int
    num_groups: int = 1  # cache groups, or pages of a column
    next_step: int = 0
    next_page: int = 1
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by row, the host's view
    computed: dict[int, int] = field(default_factory=dict)  # by row: tokens in the cache
    pages: dict[int, int] = field(default_factory=dict)  # by row: pages it owns
    wants: dict[int, int] = field(default_factory=dict)  # by row: of each chunk
    pending: list[AdmittedRow] = field(default_factory=list)

    def admit(self, row: int, tokens: list[int], params: SamplingParams, prompt_len: int | None = None) -> None:
        """The row's sequence starts with the next plan."""
        ids = np.array(tokens, dtype=np.int32)
        self.tokens[row], self.computed[row], self.pages[row] = list(tokens), 0, 0
        self.wants[row] = Wants.NOTHING if params.prompt_logprobs is None else Wants.PROMPT_LOGPROBS
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
            wants = self.wants[row] | (Wants.TOKEN if end == len(self.tokens[row]) else Wants.NOTHING)
            chunks.append(PrefillChunk(row=row, start=start, token_ids=ids, wants=wants))
            self.computed[row] = end
            pages += self._grow(row)
        for row in decode:
            self.computed[row] += 1
            pages += self._grow(row)
        admitted, self.pending = tuple(self.pending), []
        self.next_step += 1
        pages.sort(key=lambda entry: entry[0])  # group by group, as the scheduler
        columns = np.array(pages, dtype=np.int32).reshape(-1, 4).T
        return StepPlan(
            step=self.next_step,
            admitted=admitted,
            page_groups=columns[0] if self.num_groups > 1 else columns[0, :0],
            page_rows=columns[1],
            page_columns=columns[2],
            page_ids=columns[3],
            prefill=tuple(chunks),
            decode_rows=np.array(decode, dtype=np.int32),
            decode_lengths=np.array([self.computed[row] for row in decode], dtype=np.int32),
            decode_uids=np.array(decode, dtype=np.int64),
        )

    def commit(self, plan: StepPlan, token_ids: np.ndarray) -> None:
        for row, token in zip(plan.sampled_rows.tolist(), token_ids.tolist(), strict=True):
            self.tokens[row].append(token)

    def _grow(self, row: int) -> list[tuple[int, int, int, int]]:
        new = []
        while self.pages[row] * self.page_size < self.computed[row]:
            new += [(group, row, self.pages[row], self.next_page + group) for group in range(self.num_groups)]
            self.pages[row] += 1
            self.next_page += self.num_groups
        return new


def say(
    runner: ModelRunner, wishes: list[SamplingParams], prompts: list[list[int]], page_size: int, steps: int = 6
) -> list[list[int]]:
    """What rows with these options say after these prompts. Each step is launched before the one before is read.

    Grammars allow the first 96 tokens from the second step on, and everything before.
    """
    driver, rows = Driver(page_size), tuple(range(len(wishes)))
    for row, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True)):
        driver.admit(row, prompt, wish)
    lines = np.array([row for row in rows if wishes[row].grammar is not None], dtype=np.int32)
    bits = runner.no_masks(len(lines))[1]
    bits[:, 3:] = 0
    plan, pending = driver.plan(prefill={row: len(prompts[row]) for row in rows}), []
    for step in range(steps):
        plan = plan if step == 0 else driver.plan(decode=rows)
        launched = runner.execute(runner.prepare(plan))
        if isinstance(launched, UnsampledStep):
            runner.sample(launched, (lines, bits) if step else None)
        pending.append((plan, launched))
        if step:
            before, done = pending.pop(0)
            driver.commit(before, done.result().token_ids)
    driver.commit(plan, pending[0][1].result().token_ids)
    return [driver.tokens[row][len(prompts[row]) :] for row in rows]
