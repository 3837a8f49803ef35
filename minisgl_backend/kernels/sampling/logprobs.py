"""Log-probabilities of the raw logits: that of the sampled token, its rank, and the most likely tokens.

The log-sum-exp is put together from each slice's maximum and sum, as in an online softmax (Milakov and Gimelshein
2018). The `top` most likely tokens are selected as for a small top-k: the maxima of groups give a lower bound, and the
few tokens above it are sorted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl_backend.kernels.sampling.common import (
    LOW_COLUMN,
    LOWEST_KEY,
    MAX_COLUMN,
    MOST_SORTED,
    NUM_FLOATS,
    append_candidates,
    arrives_last,
    key_logit,
    key_token,
    kth_group,
    packed_key,
    take_count,
)


@triton.jit(do_not_specialize=["top"])
def logprob_stats_kernel(
    logits_ptr, lines_ptr, maxima_ptr, values_ptr, minima_ptr, floats_ptr, counters_ptr, logits_stride, top,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp, and a lower bound of the `top` largest logits."""
    piece, item = tl.program_id(0), tl.program_id(1)
    wide_item = item.to(tl.int64)
    line = tl.load(lines_ptr + item).to(tl.int64)
    token = piece * SLICE + tl.arange(0, SLICE)
    ok = token < VOCAB
    x = tl.load(logits_ptr + line * logits_stride + token, mask=ok, other=-float("inf")).to(tl.float32)
    largest = tl.max(x, 0)
    shift = tl.where(largest > -float("inf"), largest, 0.0)
    maxima = tl.max(tl.reshape(x, [GROUPS, SLICE // GROUPS]), 1)
    tl.store(maxima_ptr + (wide_item * SLICES + piece) * GROUPS + tl.arange(0, GROUPS), maxima)
    tl.store(values_ptr + wide_item * SLICES + piece, shift)
    tl.store(minima_ptr + wide_item * SLICES + piece, tl.sum(tl.exp(x - shift), 0))
    if arrives_last(counters_ptr, item, SLICES):
        s = tl.arange(0, SLICES_PADDED)
        shifts = tl.load(
            values_ptr + wide_item * SLICES + s, mask=s < SLICES, other=-float("inf"), cache_modifier=".cg"
        )
        sums = tl.load(minima_ptr + wide_item * SLICES + s, mask=s < SLICES, other=0.0, cache_modifier=".cg")
        highest = tl.max(shifts, 0)
        log_total = highest + tl.log(tl.sum(sums * tl.exp(shifts - highest), 0))
        low = float("inf")
        if top > 0:
            g = tl.arange(0, GROUPS_PADDED)
            groups = tl.load(
                maxima_ptr + wide_item * SLICES * GROUPS + g, mask=g < SLICES * GROUPS, other=-float("inf"),
                cache_modifier=".cg",
            )  # fmt: skip
            low = kth_group(groups, top, GROUPS_PADDED)
        tl.store(floats_ptr + item * NUM_FLOATS + MAX_COLUMN, log_total)
        tl.store(floats_ptr + item * NUM_FLOATS + LOW_COLUMN, low)


@triton.jit(do_not_specialize=["out_stride", "top"])
def logprob_collect_kernel(
    logits_ptr, lines_ptr, token_ids_ptr, ranks_ptr, keys_ptr, floats_ptr, counters_ptr, out_ptr, logits_stride,
    counters_stride, out_stride, top,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr,
    ID_BITS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The token's log-probability and rank, and the `top` largest in order."""
    piece, item = tl.program_id(0), tl.program_id(1)
    wide_item = item.to(tl.int64)
    line = tl.load(lines_ptr + item).to(tl.int64)
    logits_line = logits_ptr + line * logits_stride
    chosen = tl.load(token_ids_ptr + line)
    chosen_logit = tl.load(logits_line + chosen).to(tl.float32)
    low = tl.load(floats_ptr + item * NUM_FLOATS + LOW_COLUMN)
    collected_ptr = counters_ptr + counters_stride
    token = piece * SLICE + tl.arange(0, SLICE)
    x = tl.load(logits_line + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32)
    tl.store(ranks_ptr + wide_item * SLICES + piece, tl.sum((x > chosen_logit).to(tl.int32), 0))
    append_candidates(x, token, (x >= low) & (token < VOCAB), item, keys_ptr, collected_ptr, ID_BITS, CANDIDATES)
    if arrives_last(counters_ptr, item, SLICES):
        count = take_count(collected_ptr + item)
        log_total = tl.load(floats_ptr + item * NUM_FLOATS + MAX_COLUMN)
        s = tl.arange(0, SLICES_PADDED)
        ranks = tl.load(ranks_ptr + wide_item * SLICES + s, mask=s < SLICES, other=0, cache_modifier=".cg")
        out_line = out_ptr + wide_item * out_stride
        tl.store(out_line, chosen)
        tl.store(out_line + 1, (chosen_logit - log_total).to(tl.int32, bitcast=True))
        tl.store(out_line + 2, tl.sum(ranks, 0) + 1)
        if count <= MOST_SORTED:
            c = tl.arange(0, MOST_SORTED)
            keys = tl.load(
                keys_ptr + wide_item * CANDIDATES + c, mask=c < count, other=LOWEST_KEY, cache_modifier=".cg"
            )
            keys = tl.sort(keys, descending=True)
            tl.store(out_line + 3 + c, key_token(keys, ID_BITS), mask=c < top)
            value = key_logit(keys, ID_BITS) - log_total
            tl.store(out_line + 3 + top + c, value.to(tl.int32, bitcast=True), mask=c < top)
        else:  # many equal logits: the row is read again for each rank
            before = tl.full((), 1 << 62, tl.int64)
            for place in range(0, top):
                best = tl.full((), LOWEST_KEY, tl.int64)
                for start in range(0, VOCAB, SLICE):
                    token = start + tl.arange(0, SLICE)
                    x = tl.load(logits_line + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32)
                    key = tl.where(token < VOCAB, packed_key(x, token, ID_BITS), LOWEST_KEY)
                    best = tl.maximum(best, tl.max(tl.where(key < before, key, LOWEST_KEY), 0))
                tl.store(out_line + 3 + place, key_token(best, ID_BITS))
                value = key_logit(best, ID_BITS) - log_total
                tl.store(out_line + 3 + top + place, value.to(tl.int32, bitcast=True))
                before = best
