"""Repetition, presence and frequency penalties: how often each row has seen each token.

The repetition penalty counts prompt and answer, the other two the answer alone.
"""

from __future__ import annotations

import numpy as np
import torch

from minisgl_backend.runner.row_table import FREQUENCY, PRESENCE, REPETITION, RowTable

NO_LINE = -1


class PenaltyCounts:
    """Token counts of the rows that need them."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._line_of_row = np.full(max_rows, NO_LINE, dtype=np.int32)
        self._free_lines: list[int] = []
        self._num_lines = 0
        self._max_rows = max_rows
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._in_answer = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # counts

    def assign(self, row: int, needed: bool) -> None:
        """Gives a row a line, or takes it back; on the host only."""
        has_line = self._line_of_row[row] != NO_LINE
        if needed and not has_line:
            if not self._free_lines:
                more = min(max(4, self._num_lines), self._max_rows - self._num_lines)
                self._free_lines.extend(range(self._num_lines + more - 1, self._num_lines - 1, -1))
                self._num_lines += more
            self._line_of_row[row] = self._free_lines.pop()
        elif has_line and not needed:
            self._free_lines.append(int(self._line_of_row[row]))
            self._line_of_row[row] = NO_LINE

    def lines(self, rows: np.ndarray) -> np.ndarray:
        """The lines of rows that have one; int32 [n]."""
        return self._line_of_row[rows]

    def reset(self, row: int, prompt_len: int, num_tokens: int, table: RowTable) -> None:
        """Counts a row's tokens afresh from the token table: the prompt, and what was answered before a preemption."""
        self._grow()
        line = int(self._line_of_row[row])
        self._in_prompt[line].zero_()
        self._in_answer[line].zero_()
        self._in_prompt[line].index_fill_(0, table.tokens[row, :prompt_len].long(), True)
        answered = table.tokens[row, prompt_len:num_tokens].long()
        self._in_answer[line].index_add_(0, answered, torch.ones_like(answered, dtype=torch.int32))

    def apply(self, logits: torch.Tensor, index: torch.Tensor, lines: torch.Tensor, params: torch.Tensor) -> None:
        """Changes lines `index` of logits float32 [n, vocab_size] in place.

        `lines` int32 [k] are those of this table; `params` float32 [k, NUM_PARAMS] those of the rows' parameters.
        """
        chosen = logits[index]
        answered = self._in_answer[lines]
        ever = self._in_prompt[lines] | (answered > 0)
        repetition = params[:, REPETITION].unsqueeze(1)
        penalised = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
        chosen = torch.where(ever, penalised, chosen)
        chosen -= params[:, FREQUENCY].unsqueeze(1) * answered
        chosen -= params[:, PRESENCE].unsqueeze(1) * (answered > 0)
        logits[index] = chosen

    def count(self, lines: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Adds one sampled token to each of these lines (all different); int32 [k] each."""
        self._in_answer[lines, token_ids] += 1

    def _grow(self) -> None:
        missing = self._num_lines - len(self._in_answer)
        if missing > 0:
            vocab_size = self._in_answer.shape[1]
            self._in_prompt = torch.cat([self._in_prompt, self._in_prompt.new_zeros(missing, vocab_size)])
            self._in_answer = torch.cat([self._in_answer, self._in_answer.new_zeros(missing, vocab_size)])
