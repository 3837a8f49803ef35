"""Logits processors: options that change the logits of single tokens (logit bias, bad words, min_tokens).

Each option becomes rules of the form "add this value to this token's logit while the sampled position is below
`until` and the tokens before it are `prefix`". Every row has device memory for the most rules a request may have. Rules
are uploaded when the row is admitted; a step handles only the rules of its own rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from minisgl_backend.arrays import Int32Array
from minisgl_backend.kernels.sampling import layout
from minisgl_backend.kernels.upload import to_device
from minisgl_backend.request import (
    MAX_BAD_WORD_SPELLINGS,
    MAX_BAD_WORDS_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

FOREVER = 2**31 - 1


@dataclass(frozen=True)
class RowRules:
    """The rules of one row's request."""

    num_simple: int  # rules without a prefix, which come first
    columns: Int32Array  # [NUM_RULE_COLUMNS, num_rules]
    prefixes: Int32Array  # [num_prefix_tokens]


class TokenRules:
    """The rules of every row. A row whose FLAGS column lacks RULES may still hold those of an earlier request."""

    def __init__(self, max_rows: int, eos_token_ids: tuple[int, ...], max_seq_len: int, device: torch.device) -> None:
        self._eos_token_ids = eos_token_ids
        self._max_seq_len = max_seq_len
        self._num_simple = np.zeros(max_rows, dtype=np.int32)
        self._num_rules = np.zeros(max_rows, dtype=np.int32)
        self._waiting: list[tuple[int, RowRules]] = []  # not uploaded yet
        most = MAX_LOGIT_BIAS + MAX_BAD_WORD_SPELLINGS + MAX_STOP_TOKEN_IDS + len(eos_token_ids)
        shape = (max_rows, layout.NUM_RULE_COLUMNS, most)
        self.counts = torch.zeros(max_rows, 2, dtype=torch.int32, device=device)  # see kernels.sampling.inputs
        self.rules = torch.zeros(shape, dtype=torch.int32, device=device)
        self.prefixes = torch.zeros(max_rows, MAX_BAD_WORDS_TOKENS, dtype=torch.int32, device=device)

    def admit(self, row: int, params: SamplingParams, prompt_len: int) -> None:
        """Replaces the row's rules by those of its new sequence; they stay on the host until `upload`."""
        rules = compile_rules(params, prompt_len, self._eos_token_ids, self._max_seq_len)
        self._num_simple[row], self._num_rules[row] = rules.num_simple, rules.columns.shape[1]
        self._waiting.append((row, rules))

    def upload(self) -> None:
        """Copies the admitted rows' rules to the device, in stream order."""
        for row, rules in self._waiting:
            count, num_prefix = rules.columns.shape[1], len(rules.prefixes)
            head = np.array([rules.num_simple, count], dtype=np.int32)
            packed = np.concatenate([head, rules.columns.reshape(-1), rules.prefixes])
            source = to_device(packed, self.rules.device)
            self.counts[row] = source[:2]
            self.rules[row, :, :count] = source[2 : 2 + rules.columns.size].view(layout.NUM_RULE_COLUMNS, count)
            self.prefixes[row, :num_prefix] = source[2 + rules.columns.size :]
        self._waiting = []

    def apply(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Logits float32 [k, vocab_size] of `rows` [k] with the rules applied, for tokens sampled at `positions` [k].

        The reference for kernels.sampling. `tokens` int32 [max_rows, max_seq_len + 1] holds the tokens of every row.
        """
        logits = logits.clone()
        for entry, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            num_simple, count = int(self._num_simple[row]), int(self._num_rules[row])
            columns = self.rules[row, :, :count]
            active = position < columns[layout.RULE_UNTIL]
            for index in range(num_simple, count):
                start, length = columns[layout.RULE_PREFIX :, index].tolist()
                past = tokens[row, max(0, position - length) : position]
                active[index] &= torch.equal(past, self.prefixes[row, start : start + length])
            values = torch.where(active, columns[layout.RULE_VALUE].view(torch.float32), 0.0)
            logits[entry].index_add_(0, columns[layout.RULE_TOKEN].long(), values)
        return logits


def compile_rules(
    params: SamplingParams, prompt_len: int, eos_token_ids: tuple[int, ...], max_seq_len: int
) -> RowRules:
    """The rules of a request whose prompt has `prompt_len` tokens."""
    simple: list[tuple[int, float, int]] = [(token, bias, FOREVER) for token, bias in params.logit_bias.items()]
    words: list[tuple[int, ...]] = []
    for word in params.bad_words_token_ids:
        if len(word) == 1:
            simple.append((word[0], -math.inf, FOREVER))
        elif 1 < len(word) <= max_seq_len:  # a longer one can never be completed
            words.append(tuple(word))
    if params.min_tokens:
        # The token at position prompt_len + i is token number i of the answer, counted from 0.
        until = min(prompt_len + params.min_tokens, FOREVER)
        ends = dict.fromkeys((*eos_token_ids, *params.stop_token_ids))
        simple += [(token, -math.inf, until) for token in ends]
    count = len(simple) + len(words)
    columns = np.zeros((layout.NUM_RULE_COLUMNS, count), dtype=np.int32)
    columns[layout.RULE_TOKEN] = [token for token, _, _ in simple] + [word[-1] for word in words]
    values = np.array([value for _, value, _ in simple] + [-math.inf] * len(words), dtype=np.float32)
    columns[layout.RULE_VALUE] = values.view(np.int32)
    columns[layout.RULE_UNTIL] = [until for _, _, until in simple] + [FOREVER] * len(words)
    lengths = np.array([len(word) - 1 for word in words], dtype=np.int32)
    columns[layout.RULE_PREFIX, len(simple) :] = np.cumsum(lengths) - lengths
    columns[layout.RULE_PREFIX_LEN, len(simple) :] = lengths
    prefixes = np.array([token for word in words for token in word[:-1]], dtype=np.int32)
    return RowRules(len(simple), columns, prefixes)
