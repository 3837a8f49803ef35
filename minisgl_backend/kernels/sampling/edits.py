"""First stage of sampling: penalties, grammar masks and rules, applied to a float32 copy of the rows that need them.

In order: the repetition penalty (CTRL, Keskar et al. 2019: divides positive logits, multiplies the others), the
frequency and the presence penalty (as OpenAI's API defines them), the grammar's mask; then what is added to single
tokens: logit bias, bad words and min_tokens, which are rules (sampling/logits_processors.py). Where rules forbid every
token that the grammar allows, the grammar wins.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl_backend.kernels.sampling import layout
from minisgl_backend.kernels.sampling.common import EDITS, FLAGS, MOST_ANSWERED, PENALTIES, wait_for_previous

_REPETITION = tl.constexpr(layout.REPETITION)
_PRESENCE = tl.constexpr(layout.PRESENCE)
_FREQUENCY = tl.constexpr(layout.FREQUENCY)
_RULES = tl.constexpr(layout.RULES)
_RULE_TOKEN = tl.constexpr(layout.RULE_TOKEN)
_RULE_VALUE = tl.constexpr(layout.RULE_VALUE)
_RULE_UNTIL = tl.constexpr(layout.RULE_UNTIL)
_RULE_PREFIX = tl.constexpr(layout.RULE_PREFIX)
_RULE_PREFIX_LEN = tl.constexpr(layout.RULE_PREFIX_LEN)
_RULE_COLUMNS = tl.constexpr(layout.NUM_RULE_COLUMNS)


@triton.jit
def _allowed(bits_line, token, VOCAB: tl.constexpr):
    word = tl.load(bits_line + (token >> 5), mask=token < VOCAB, other=0)
    return ((word >> (token & 31)) & 1) != 0


@triton.jit
def edit_kernel(
    logits_ptr, edited_ptr, rows_ptr, params_ptr, counts_ptr, mask_index_ptr, mask_bits_ptr, logits_stride,
    params_stride, counts_stride, VOCAB: tl.constexpr, SLICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    line = tl.program_id(1)
    row = tl.load(rows_ptr + line).to(tl.int64)
    row_params = params_ptr + row * params_stride
    flags = tl.load(row_params + FLAGS)
    mask_index = tl.load(mask_index_ptr + line)
    if ((flags & EDITS) != 0) | (mask_index >= 0):
        token = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
        ok = token < VOCAB
        x = tl.load(logits_ptr + line.to(tl.int64) * logits_stride + token, mask=ok, other=0.0).to(tl.float32)
        if (flags & PENALTIES) != 0:
            repetition = tl.load(row_params + _REPETITION).to(tl.float32, bitcast=True)
            presence = tl.load(row_params + _PRESENCE).to(tl.float32, bitcast=True)
            frequency = tl.load(row_params + _FREQUENCY).to(tl.float32, bitcast=True)
            seen = tl.load(counts_ptr + row * counts_stride + token, mask=ok, other=0).to(tl.int32)
            answered = seen & MOST_ANSWERED
            x = tl.where(seen != 0, tl.where(x > 0, tl.div_rn(x, repetition + 0 * x), x * repetition), x)
            x -= frequency * answered.to(tl.float32)
            x -= tl.where(answered > 0, presence, 0.0)
        if mask_index >= 0:
            words = (VOCAB + 31) // 32
            allowed = _allowed(mask_bits_ptr + mask_index.to(tl.int64) * words, token, VOCAB)
            # NaN stays, so that the row is found to be unsound.
            x = tl.where(allowed | (x != x), x, -float("inf"))
        tl.store(edited_ptr + line.to(tl.int64) * VOCAB + token, x, mask=ok)


@triton.jit
def rules_kernel(
    logits_ptr, edited_ptr, rows_ptr, positions_ptr, params_ptr, tokens_ptr, rule_counts_ptr, rules_ptr, prefixes_ptr,
    mask_index_ptr, mask_bits_ptr, logits_stride, params_stride, tokens_stride, max_rules, prefixes_stride,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for each row: it pays for its own rules only."""
    wait_for_previous(PDL)
    line = tl.program_id(0)
    row = tl.load(rows_ptr + line).to(tl.int64)
    flags = tl.load(params_ptr + row * params_stride + FLAGS)
    if (flags & _RULES) != 0:
        edited_line = edited_ptr + line.to(tl.int64) * VOCAB
        position = tl.load(positions_ptr + line)
        num_simple = tl.load(rule_counts_ptr + row * 2)
        num_rules = tl.load(rule_counts_ptr + row * 2 + 1)
        row_rules = rules_ptr + row * _RULE_COLUMNS * max_rules
        for start in range(0, num_simple, 256):
            rule = start + tl.arange(0, 256)
            ok = rule < num_simple
            until = tl.load(row_rules + _RULE_UNTIL * max_rules + rule, mask=ok, other=0)
            token = tl.load(row_rules + _RULE_TOKEN * max_rules + rule, mask=ok, other=0)
            value = tl.load(row_rules + _RULE_VALUE * max_rules + rule, mask=ok, other=0)
            active = ok & (position < until)
            tl.atomic_add(edited_line + token, value.to(tl.float32, bitcast=True), mask=active, sem="relaxed")
        for start in range(num_simple, num_rules, 32):
            rule = start + tl.arange(0, 32)
            ok = rule < num_rules
            until = tl.load(row_rules + _RULE_UNTIL * max_rules + rule, mask=ok, other=0)
            token = tl.load(row_rules + _RULE_TOKEN * max_rules + rule, mask=ok, other=0)
            value = tl.load(row_rules + _RULE_VALUE * max_rules + rule, mask=ok, other=0)
            first = tl.load(row_rules + _RULE_PREFIX * max_rules + rule, mask=ok, other=0)
            length = tl.load(row_rules + _RULE_PREFIX_LEN * max_rules + rule, mask=ok, other=0)
            matches = (ok & (position < until) & (length <= position)).to(tl.int32)
            back = 0
            while tl.max(matches * length, 0) > back:  # the nearest tokens first: few words get beyond them
                distance = back + tl.arange(0, 32)
                inside = (distance[None, :] < length[:, None]) & (matches[:, None] != 0)
                at = first[:, None] + length[:, None] - 1 - distance[None, :]
                wanted = tl.load(prefixes_ptr + row * prefixes_stride + at, mask=inside, other=0)
                there = position - 1 - distance
                past = tl.load(tokens_ptr + row * tokens_stride + there, mask=there >= 0, other=-1)
                differs = (inside & (wanted != past[None, :])).to(tl.int32)
                matches = tl.where(tl.max(differs, 1) > 0, 0, matches)
                back += 32
            active = matches != 0
            tl.atomic_add(edited_line + token, value.to(tl.float32, bitcast=True), mask=active, sem="relaxed")
        mask_index = tl.load(mask_index_ptr + line)
        if mask_index >= 0:
            tl.debug_barrier()
            best = -float("inf")
            for start in range(0, VOCAB, SLICE):
                token = start + tl.arange(0, SLICE)
                x = tl.load(edited_line + token, mask=token < VOCAB, other=-float("inf"), cache_modifier=".cg")
                best = tl.maximum(best, tl.max(tl.where(x != x, float("inf"), x), 0))
            if best == -float("inf"):  # rules forbid every token that the grammar allows: the grammar wins
                logits_line = logits_ptr + line.to(tl.int64) * logits_stride
                bits_line = mask_bits_ptr + mask_index.to(tl.int64) * ((VOCAB + 31) // 32)
                for start in range(0, VOCAB, SLICE):
                    token = start + tl.arange(0, SLICE)
                    ok = token < VOCAB
                    x = tl.load(logits_line + token, mask=ok, other=0.0).to(tl.float32)
                    x = tl.where(_allowed(bits_line, token, VOCAB), x, -float("inf"))
                    tl.store(edited_line + token, x, mask=ok)
