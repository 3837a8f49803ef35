"""Repetition, presence and frequency penalties: how often each row has seen each token.

The repetition penalty counts prompt and answer, the other two the answer alone.
"""

from __future__ import annotations

import torch

from minisgl_backend.kernels.sampling.layout import FREQUENCY, IN_PROMPT, MOST_ANSWERED, PRESENCE, REPETITION
from minisgl_backend.kv.zeros import zeros


class PenaltyCounts:
    """Token counts of every row, two bytes per token, allocated once: no step needs more memory than was measured."""

    counts: torch.Tensor  # int16 [max_rows, vocab_size], see sampling.layout.IN_PROMPT

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.counts = zeros((max_rows, vocab_size), torch.int16, device)

    def reset(self, row: int, tokens: torch.Tensor, prompt_len: int) -> None:
        """Counts a row anew. `tokens` int32 [num_tokens]: its prompt, and what it had generated before a preemption."""
        row_counts = self.counts[row]
        row_counts.zero_()
        answer = tokens[prompt_len:].long()
        if len(answer):
            answered = torch.zeros(len(row_counts), dtype=torch.int32, device=row_counts.device)
            answered.index_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))
            row_counts.copy_(answered.clamp_(max=MOST_ANSWERED))
        prompt = tokens[:prompt_len].long()
        row_counts[prompt] = row_counts[prompt] | IN_PROMPT

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        """Penalised logits float32 [k, vocab_size] of `rows` [k]; `params` float32 [k, NUM_PARAMS] are theirs."""
        seen = self.counts[rows]
        answered = seen & MOST_ANSWERED
        repetition = params[:, REPETITION].unsqueeze(1)
        penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen != 0, penalised, logits)
        logits = logits - params[:, FREQUENCY].unsqueeze(1) * answered
        return logits - params[:, PRESENCE].unsqueeze(1) * (answered > 0)

    def count(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Adds one sampled token to the counts of each row (all different); [k] each."""
        seen = self.counts[rows, token_ids]
        self.counts[rows, token_ids] = seen + ((seen & MOST_ANSWERED) < MOST_ANSWERED)
