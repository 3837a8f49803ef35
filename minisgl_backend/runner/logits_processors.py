"""Options that change the logits of single tokens: logit bias, bad words, and min_tokens.

All of them are one table of rules, "in this row add this value to this token's logit, while the sampled position is
below `until` and the tokens before it are `prefix`", applied to a whole batch at once. The table is uploaded when a row
with rules comes, not in every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from minisgl_backend.request import SamplingParams
from minisgl_backend.runner.row_table import RowTable
from minisgl_backend.runner.staging import to_device

FOREVER = 2**31 - 1
ANY_TOKEN = -1  # in a prefix: matches everything


@dataclass(frozen=True)
class RuleTable:
    """The rules of all rows, on the device."""

    rows: torch.Tensor  # int32 [num_rules]
    token_ids: torch.Tensor  # int32 [num_rules]
    values: torch.Tensor  # float32 [num_rules]  added to the logit; minus infinity forbids
    until: torch.Tensor  # int32 [num_rules]  first sampled position at which the rule is over
    prefixes: torch.Tensor  # int32 [num_rules, longest]  tokens just before the sampled one, aligned right

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, table: RowTable) -> None:
        """Changes logits float32 [n, vocab_size] in place; `rows` and `positions` [n] are of the sampled tokens."""
        n = len(rows)
        line_of_row = torch.full((table.max_rows,), -1, dtype=torch.int32, device=logits.device)
        line_of_row[rows] = torch.arange(n, dtype=torch.int32, device=logits.device)
        lines = line_of_row[self.rows]
        active = lines >= 0  # the row is in this step
        lines = lines.clamp(min=0)
        sampled_at = positions[lines]
        active &= sampled_at < self.until
        longest = self.prefixes.shape[1]
        if longest:
            before = torch.arange(-longest, 0, dtype=torch.int32, device=logits.device)
            places = sampled_at.unsqueeze(1) + before
            past = table.tokens[self.rows.unsqueeze(1), places.clamp(min=0)]
            matches = (self.prefixes == ANY_TOKEN) | ((places >= 0) & (past == self.prefixes))
            active &= matches.all(dim=1)
        values = torch.where(active, self.values, 0.0)
        logits.index_put_((lines, self.token_ids), values, accumulate=True)


@dataclass(frozen=True)
class _RowRules:
    token_ids: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]
    until: npt.NDArray[np.int32]
    prefixes: tuple[tuple[int, ...], ...]


class TokenRules:
    """The rules of each row on the host, and their table on the device."""

    def __init__(self, max_rows: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self.until = np.zeros(max_rows, dtype=np.int32)  # per row: where the last of its rules is over
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._by_row: dict[int, _RowRules] = {}
        self._table: RuleTable | None = None  # None: out of date

    @property
    def any(self) -> bool:
        return bool(self._by_row)

    def admit(self, row: int, params: SamplingParams, prompt_len: int) -> None:
        """Replaces the rules of a row by those of the sequence that takes it."""
        rules = _compile(params, prompt_len, self._eos_token_ids)
        if rules is None and row not in self._by_row:
            return
        self._table = None
        if rules is None:
            del self._by_row[row]
            self.until[row] = 0
        else:
            self._by_row[row] = rules
            self.until[row] = rules.until.max()

    def table(self) -> RuleTable:
        """The device table, uploaded again where rows have changed."""
        if self._table is None:
            self._table = self._upload()
        return self._table

    def _upload(self) -> RuleTable:
        rules = list(self._by_row.values())
        sizes = [len(rule.token_ids) for rule in rules]
        prefixes = [prefix for rule in rules for prefix in rule.prefixes]
        longest = max((len(prefix) for prefix in prefixes), default=0)
        matrix = np.full((len(prefixes), longest), ANY_TOKEN, dtype=np.int32)
        for line, prefix in enumerate(prefixes):
            if prefix:
                matrix[line, longest - len(prefix) :] = prefix
        return RuleTable(
            rows=to_device(np.repeat(np.array(list(self._by_row), dtype=np.int32), sizes), self._device),
            token_ids=to_device(np.concatenate([rule.token_ids for rule in rules]), self._device),
            values=to_device(np.concatenate([rule.values for rule in rules]), self._device),
            until=to_device(np.concatenate([rule.until for rule in rules]), self._device),
            prefixes=to_device(matrix, self._device),
        )


def _compile(params: SamplingParams, prompt_len: int, eos_token_ids: tuple[int, ...]) -> _RowRules | None:
    rules: list[tuple[int, float, int, tuple[int, ...]]] = []
    rules += [(token, bias, FOREVER, ()) for token, bias in params.logit_bias.items()]
    rules += [(word[-1], -math.inf, FOREVER, tuple(word[:-1])) for word in params.bad_words_token_ids if word]
    if params.min_tokens:
        # The token at position prompt_len + i is the answer's token number i, counted from 0.
        ends = dict.fromkeys((*eos_token_ids, *params.stop_token_ids))
        rules += [(token, -math.inf, prompt_len + params.min_tokens, ()) for token in ends]
    if not rules:
        return None
    tokens, values, until, prefixes = zip(*rules, strict=True)
    return _RowRules(
        np.array(tokens, dtype=np.int32), np.array(values, dtype=np.float32), np.array(until, dtype=np.int32), prefixes
    )
