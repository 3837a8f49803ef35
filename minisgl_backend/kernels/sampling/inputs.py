"""What sampling is given: of all rows, and of those of one step. All tensors are on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class RowTables(NamedTuple):
    """Of all rows: options, and what penalties and rules need."""

    params: torch.Tensor  # int32 [max_rows, NUM_PARAMS]
    tokens: torch.Tensor  # int32 [max_rows, max_seq_len + 1]  by position
    counts: torch.Tensor  # int16 [max_rows, vocab_size]  see layout.IN_PROMPT
    rule_counts: torch.Tensor  # int32 [max_rows, 2]  rules without a prefix, and all rules
    rules: torch.Tensor  # int32 [max_rows, NUM_RULE_COLUMNS, max_rules]  those without a prefix first
    prefixes: torch.Tensor  # int32 [max_rows, max_prefix_tokens]


@dataclass(frozen=True, kw_only=True)
class SampledRows:
    """The rows that sample in one step, and their needs."""

    rows: torch.Tensor  # int32 [n]
    positions: torch.Tensor  # int32 [n]  of the tokens to be sampled
    flags: int  # union of these rows' layout.FLAGS, GRAMMAR where there are masks
    searches: bool = False  # at least one ranked row is not layout.is_complete
    mask_index: torch.Tensor | None = None  # int32 [n]  row of mask_bits, or -1
    mask_bits: torch.Tensor | None = None  # int32 [k, ceil(vocab_size / 32)]  1: allowed
