"""Plans of models with states made by hand, in the simplest way that keeps the rules."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
from hand_made_plans import Driver

from minisgl_backend.request import SamplingParams
from minisgl_backend.step import StepPlan


@dataclass
class StateDriver(Driver):
    """Row i has slot i + 1 until a state is kept; then it folds into the next free one."""

    slots: dict[int, int] = field(default_factory=dict)  # by row
    borders: dict[int, int] = field(default_factory=dict)  # by row: tokens that its slot stands for
    kept: set[int] = field(default_factory=set)  # slots that are not folded into
    next_slot: int = 20

    def admit(self, row: int, tokens: list[int], params: SamplingParams, prompt_len: int | None = None) -> None:
        super().admit(row, tokens, params, prompt_len)
        self.slots[row], self.borders[row] = row + 1, 0
        self.pending[-1] = msgspec.structs.replace(self.pending[-1], state_slot=row + 1)

    def begin_with(self, row: int, source: int, border: int, pages_of: int) -> None:
        """The row that was admitted last has its first tokens' pages and state from elsewhere."""
        columns = border // self.page_size
        pages = [entry for entry in self.shared_pages[pages_of] if entry[0] < columns]
        self.computed[row], self.pages[row], self.borders[row] = border, columns, border
        self.inherited[row] = pages
        self.pending[-1] = msgspec.structs.replace(self.pending[-1], cached_len=border, state_source=source)

    shared_pages: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # by row: (column, page)
    inherited: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def plan(
        self,
        prefill: dict[int, int] | None = None,
        decode: tuple[int, ...] = (),
        drafts: dict[int, list[int]] | None = None,
        checkpoints: dict[int, tuple[tuple[int, int], ...]] | None = None,
    ) -> StepPlan:
        """drafts: by row of `decode`; of these rows `computed` does not count what may be wrong. checkpoints: by row of
        `prefill`."""
        drafts = drafts or {}
        folds = [self._fold(row) for row in decode if self.computed[row] // self.page_size > self._column(row)]
        most = {row: self.computed[row] for row in decode}
        for row, guesses in drafts.items():  # pages for them, too
            self.computed[row] += len(guesses)
        plan = super().plan(prefill, decode)
        for row, before in most.items():
            self.computed[row] = before + 1
        for _, row, column, page in zip(
            plan.page_ids, plan.page_rows.tolist(), plan.page_columns.tolist(), plan.page_ids.tolist(), strict=True
        ):
            self.shared_pages.setdefault(row, []).append((column, page))
        new = [(row, column, page) for row, entries in self.inherited.items() for column, page in entries]
        self.inherited.clear()
        chunks = tuple(
            msgspec.structs.replace(chunk, checkpoints=(checkpoints or {}).get(chunk.row, ())) for chunk in plan.prefill
        )
        for chunk in chunks:
            self.borders[chunk.row] = chunk.end // self.page_size * self.page_size
        entries = [
            (row, most[row] + 1 + index, token)
            for row in decode
            for index, token in enumerate([-1, *drafts.get(row, [])])
        ]
        rows, lengths, tokens = np.array(entries, dtype=np.int32).reshape(-1, 3).T
        fold_rows, sources, targets, borders = np.array(folds, dtype=np.int32).reshape(-1, 4).T
        new_rows, new_columns, new_pages = np.array(new, dtype=np.int32).reshape(-1, 3).T
        return msgspec.structs.replace(
            plan,
            prefill=chunks,
            page_rows=np.concatenate([plan.page_rows, new_rows]),
            page_columns=np.concatenate([plan.page_columns, new_columns]),
            page_ids=np.concatenate([plan.page_ids, new_pages]),
            decode_rows=rows,
            decode_lengths=lengths,
            decode_uids=rows.astype(np.int64),
            draft_tokens=tokens if drafts else tokens[:0],
            fold_rows=fold_rows,
            fold_sources=sources,
            fold_targets=targets,
            fold_borders=borders,
        )

    def commit(self, plan: StepPlan, token_ids: np.ndarray) -> None:
        accepted = plan.accepted(token_ids)
        for row, token, is_accepted in zip(
            plan.sampled_rows.tolist(), token_ids.tolist(), accepted.tolist(), strict=True
        ):
            if is_accepted:
                self.tokens[row].append(token)
                self.computed[row] = len(self.tokens[row]) - 1

    def _column(self, row: int) -> int:
        return self.borders[row] // self.page_size

    def _fold(self, row: int) -> tuple[int, int, int, int]:
        source = target = self.slots[row]
        if source in self.kept:
            target = self.slots[row] = self.next_slot
            self.next_slot += 1
        self.borders[row] = self.computed[row] // self.page_size * self.page_size
        return row, source, target, self.borders[row]
