"""A prompt that has a step to itself: all inputs of its pass as one array.

Everything before the launch of its pass adds to the time to first token. So the host computes here what the device
would otherwise gather from the row table, and uploads it in one piece to where the captured graph of its size reads it
(`graphs.pieces`): one copy and one launch. The row table is updated afterwards, while the device computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from minisgl_backend.arrays import Int32Array
from minisgl_backend.attention.base import PROMPT_GRAPH_CONTEXT, PromptInputs
from minisgl_backend.runner.staging import aligned
from minisgl_backend.step import StepPlan

_Words = TypeVar("_Words", Int32Array, torch.Tensor)
_NUM_LENGTHS = 4  # 0, query tokens, all tokens, the last query token's row


@dataclass(frozen=True)
class PromptTensors:
    """Inputs of a captured pass of up to `size` tokens, at fixed addresses; int32. Tokens after the prompt's are on
    the padding page."""

    token_ids: torch.Tensor  # [size]
    positions: torch.Tensor  # [size]
    slots: tuple[torch.Tensor, ...]  # by cache group, [size]
    last_index: torch.Tensor  # [1]  of the last token, whose hidden state is the only output
    attention: PromptInputs


class PromptLayout:
    """Layout of the array: token ids, positions and slots, then pages, then lengths. Slots and pages are ordered by
    cache group."""

    def __init__(self, page_size: int, max_pages_per_row: int, num_groups: int = 1) -> None:
        self._page_size = page_size
        self._num_groups = num_groups
        self._max_pages = min(max_pages_per_row, -(-PROMPT_GRAPH_CONTEXT // page_size))
        self._in_page = np.arange(page_size, dtype=np.int32)
        self._positions = np.arange(PROMPT_GRAPH_CONTEXT, dtype=np.int32)

    def serves(self, plan: StepPlan) -> bool:
        """Whether the step is the first one of a sequence and has nothing else in it, whatever its number of tokens.
        Its pages then come group by group, with the same columns in each."""
        if len(plan.prefill) != 1 or len(plan.admitted) != 1 or len(plan.decode_rows) or len(plan.cleared_pages):
            return False
        chunk, num_pages = plan.prefill[0], len(plan.page_ids) // self._num_groups
        return (
            plan.admitted[0].row == chunk.row
            and chunk.end <= PROMPT_GRAPH_CONTEXT
            and num_pages <= self._max_pages
            and bool((plan.page_rows == chunk.row).all())
            and len(plan.page_ids) == self._num_groups * num_pages
            and (not num_pages or int(plan.page_columns[-1]) == num_pages - 1)
        )

    def num_words(self, size: int) -> int:
        """Of the array."""
        return self._first_page(size) + self._num_groups * aligned(self._max_pages) + _NUM_LENGTHS

    def pack(self, plan: StepPlan, size: int) -> Int32Array:
        """The array of a plan that it serves and whose chunk has at most `size` tokens; int32 [num_words(size)]."""
        chunk, pages, width = plan.prefill[0], plan.page_ids.reshape(self._num_groups, -1), aligned(size)
        count, start, end = len(chunk.token_ids), chunk.start, chunk.end
        words = np.zeros(self.num_words(size), dtype=np.int32)
        words[:count] = chunk.token_ids
        words[width : width + count] = self._positions[start:end]
        slots = words[2 * width : self._first_page(size)].reshape(self._num_groups, width)[:, :count]
        if pages.size:
            of_pages = pages[:, :, None] * np.int32(self._page_size) + self._in_page
            slots[:] = of_pages.reshape(self._num_groups, -1)[:, start:end]
            self._pages(words, size)[:, : pages.shape[1]] = pages
        else:  # a step before the first request: all tokens are on the padding page
            slots[:] = self._positions[start:end] % self._page_size
        words[-_NUM_LENGTHS:] = 0, count, end, count - 1
        return words

    def padding(self, size: int) -> Int32Array:
        """The array of one token on the padding page, with which passes are captured."""
        words = np.zeros(self.num_words(size), dtype=np.int32)
        words[-_NUM_LENGTHS:] = 0, 1, 1, 0
        return words

    def views(self, words: torch.Tensor, size: int) -> PromptTensors:
        """The parts of the array on the device; `words` int32 [num_words(size)]."""
        width = aligned(size)
        token_ids, positions, *slots = words[: self._first_page(size)].view(-1, width)[:, :size]
        tables = tuple(table.view(1, -1) for table in self._pages(words, size)[:, : self._max_pages])
        lengths = words[len(words) - _NUM_LENGTHS :]
        return PromptTensors(
            token_ids=token_ids,
            positions=positions,
            slots=tuple(slots),
            last_index=lengths[3:4],
            attention=PromptInputs(
                num_tokens=size,
                cu_seqlens_q=lengths[:2],
                kv_lens=lengths[2:3],
                page_table=tables[0],
                page_tables=tables if self._num_groups > 1 else (),
            ),
        )

    def pages(self, words: torch.Tensor, size: int, count: int) -> torch.Tensor:
        """The first `count` pages of each cache group on the device; int32 [num_groups, count]."""
        return self._pages(words, size)[:, :count]

    def _first_page(self, size: int) -> int:
        return (2 + self._num_groups) * aligned(size)

    def _pages(self, words: _Words, size: int) -> _Words:
        """int32 [num_groups, aligned(max_pages)]"""
        return words[self._first_page(size) : len(words) - _NUM_LENGTHS].reshape(self._num_groups, -1)
