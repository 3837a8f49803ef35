"""Second stage of sampling: which tokens min-p, top-k and top-p leave, found as a border and without sorting a row.

In order: min-p (Nguyen et al. 2024), top-k, top-p (Holtzman et al. 2019) on what top-k left. Min-p needs the largest
logit alone. The other two keep all tokens from a border on, by logit and then by token id, and four kernels close in on
it; sampling.py says what each does.

The search is the multi-pivot search of FlashInfer's sorting-free sampling, down to a bracket with few tokens in it.
There `settle_kernel` bisects their keys, int64 of a logit and a token id, with weights that are integers, so that the
border is exact. Two ways lead past this. Where a row's few candidates are all that it can sample, they are sorted, and
the row is sampled at once. Where there are too many, or a large top-k and a top-p need two borders, the row is read
again and again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl_backend.kernels.sampling_common import (
    BORDER_COLUMN,
    DONE_COLUMN,
    EDITS,
    FILTERS,
    FLAGS,
    HIGH_COLUMN,
    LOW_COLUMN,
    LOWEST_KEY,
    MAX_COLUMN,
    MOST_SORTED,
    NUM_FLOATS,
    NUM_LONGS,
    RANKED,
    SMALL_TOP_K,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TOTAL_COLUMN,
    WEIGHT_UNIT,
    append_candidates,
    arrives_last,
    key_logit,
    key_token,
    kth_group,
    load_logits,
    min_p_bound,
    ordered_bits,
    packed_key,
    row_is_complete,
    take_count,
    token_weights,
    wait_for_previous,
)
from minisgl_backend.kernels.sampling_draw import gumbel_noise, noise_keys, write_token


@triton.jit
def stats_kernel(
    logits_ptr, edited_ptr, rows_ptr, params_ptr, mask_index_ptr, maxima_ptr, minima_ptr, floats_ptr, longs_ptr,
    counters_ptr, logits_stride, params_stride,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The largest logit, and a bracket [low, high) around the border of top-k and top-p."""
    wait_for_previous(PDL)
    piece, line = tl.program_id(0), tl.program_id(1)
    row_params = params_ptr + tl.load(rows_ptr + line).to(tl.int64) * params_stride
    flags = tl.load(row_params + FLAGS)
    if (flags & FILTERS) != 0:
        is_edited = ((flags & EDITS) != 0) | (tl.load(mask_index_ptr + line) >= 0)
        wide_line = line.to(tl.int64)
        token = piece * SLICE + tl.arange(0, SLICE)
        x = load_logits(logits_ptr + wide_line * logits_stride, edited_ptr + wide_line * VOCAB, is_edited, token, VOCAB)
        x = tl.where(x != x, float("inf"), x)  # such a row is unsound
        maxima = tl.max(tl.reshape(x, [GROUPS, SLICE // GROUPS]), 1)
        tl.store(maxima_ptr + (wide_line * SLICES + piece) * GROUPS + tl.arange(0, GROUPS), maxima)
        tl.store(minima_ptr + wide_line * SLICES + piece, tl.min(tl.where(x > -float("inf"), x, float("inf")), 0))
        if arrives_last(counters_ptr, line, SLICES):
            g = tl.arange(0, GROUPS_PADDED)
            groups = tl.load(
                maxima_ptr + wide_line * SLICES * GROUPS + g, mask=g < SLICES * GROUPS, other=-float("inf"),
                cache_modifier=".cg",
            )  # fmt: skip
            largest = tl.max(groups, 0)
            low = -float("inf")
            if ((flags & RANKED) != 0) & (VOCAB > CANDIDATES):
                top_k = tl.load(row_params + TOP_K)
                top_p = tl.load(row_params + TOP_P).to(tl.float32, bitcast=True)
                temperature = tl.load(row_params + TEMPERATURE).to(tl.float32, bitcast=True)
                if (top_k > 0) & (top_k <= SMALL_TOP_K):
                    low = kth_group(groups, top_k, GROUPS_PADDED)
                else:
                    s = tl.arange(0, SLICES_PADDED)
                    minima = tl.load(
                        minima_ptr + wide_line * SLICES + s, mask=s < SLICES, other=float("inf"), cache_modifier=".cg"
                    )
                    low = tl.min(minima, 0)
                    if top_k <= 0:
                        # All that is further below the largest adds up to less than 1 - top_p of it.
                        most = tl.log(VOCAB / (1.0 - top_p)) + 0.01
                        low = tl.maximum(low, largest - tl.minimum(most, 28.0) * temperature)
            tl.store(floats_ptr + line * NUM_FLOATS + MAX_COLUMN, largest)
            tl.store(floats_ptr + line * NUM_FLOATS + LOW_COLUMN, low)
            tl.store(floats_ptr + line * NUM_FLOATS + HIGH_COLUMN, float("inf"))
            tl.store(longs_ptr + line * NUM_LONGS + DONE_COLUMN, 0)
            tl.store(longs_ptr + line * NUM_LONGS + BORDER_COLUMN, LOWEST_KEY)


@triton.jit
def search_kernel(
    logits_ptr, edited_ptr, rows_ptr, params_ptr, mask_index_ptr, sums_ptr, totals_ptr, floats_ptr, longs_ptr,
    counters_ptr, logits_stride, params_stride,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr,
    FIRST: tl.constexpr, PIVOTS: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Makes the bracket PIVOTS + 1 times narrower. Sums are float32 here: what they leave open stays inside."""
    wait_for_previous(PDL)
    piece, line = tl.program_id(0), tl.program_id(1)
    row_params = params_ptr + tl.load(rows_ptr + line).to(tl.int64) * params_stride
    flags = tl.load(row_params + FLAGS)
    top_k = tl.load(row_params + TOP_K)
    top_p = tl.load(row_params + TOP_P).to(tl.float32, bitcast=True)
    is_complete = row_is_complete(top_k, VOCAB, CANDIDATES)
    largest = tl.load(floats_ptr + line * NUM_FLOATS + MAX_COLUMN)
    counts = top_k > 0
    searches = ((flags & RANKED) != 0) & (is_complete == 0) & ((top_k <= 0) | (top_p >= 1.0))
    if searches & (largest < float("inf")) & (largest > -float("inf")):
        is_edited = ((flags & EDITS) != 0) | (tl.load(mask_index_ptr + line) >= 0)
        wide_line = line.to(tl.int64)
        token = piece * SLICE + tl.arange(0, SLICE)
        x = load_logits(logits_ptr + wide_line * logits_stride, edited_ptr + wide_line * VOCAB, is_edited, token, VOCAB)
        inverse = 1.0 / tl.load(row_params + TEMPERATURE).to(tl.float32, bitcast=True)
        lowest_z = min_p_bound(row_params, flags, largest, inverse)
        z = x * inverse
        weights = tl.where(counts, 1.0, tl.exp(z - largest * inverse))
        weights = tl.where((x > -float("inf")) & (z >= lowest_z), weights, 0.0)
        low = tl.load(floats_ptr + line * NUM_FLOATS + LOW_COLUMN)
        high = tl.load(floats_ptr + line * NUM_FLOATS + HIGH_COLUMN)
        step = (tl.minimum(high, largest) - low) * (1.0 / (PIVOTS + 1))
        pivot = tl.arange(0, PIVOTS)
        pivots = low + step * (pivot + 1).to(tl.float32)
        if FIRST:
            exact = token_weights(x, largest, inverse, lowest_z, counts)
            tl.store(totals_ptr + wide_line * SLICES + piece, tl.sum(exact, 0))
        # All pivots in one reduction: the exchange between warps is what it costs.
        above = tl.sum(tl.where(x[None, :] >= pivots[:, None], weights[None, :], 0.0), 1)
        tl.store(sums_ptr + (wide_line * SLICES + piece) * PIVOTS + pivot, above)
        if arrives_last(counters_ptr, line, SLICES):
            s = tl.arange(0, SLICES_PADDED)
            if FIRST:
                totals = tl.load(
                    totals_ptr + wide_line * SLICES + s, mask=s < SLICES, other=0, cache_modifier=".cg"
                )  # fmt: skip
                total = tl.sum(totals, 0)
                tl.store(longs_ptr + line * NUM_LONGS + TOTAL_COLUMN, total)
            else:
                total = tl.load(longs_ptr + line * NUM_LONGS + TOTAL_COLUMN)
            limit = tl.where(counts, top_k.to(tl.float32), total.to(tl.float32) * (1.0 / WEIGHT_UNIT) * top_p)
            at = sums_ptr + (wide_line * SLICES + s[None, :]) * PIVOTS + pivot[:, None]
            above = tl.sum(tl.load(at, mask=(s < SLICES)[None, :], other=0.0, cache_modifier=".cg"), 1)
            new_low = tl.max(tl.where(above >= limit * 1.000004, pivots, low), 0)
            new_high = tl.min(tl.where(above < limit * 0.999996, pivots, high), 0)
            tl.store(floats_ptr + line * NUM_FLOATS + LOW_COLUMN, new_low)
            tl.store(floats_ptr + line * NUM_FLOATS + HIGH_COLUMN, new_high)


@triton.jit
def collect_kernel(
    logits_ptr, edited_ptr, rows_ptr, params_ptr, mask_index_ptr, totals_ptr, keys_ptr, floats_ptr, counters_ptr,
    logits_stride, params_stride, counters_stride,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr,
    ID_BITS: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The tokens in the bracket, and the weight of all above it. `settle_kernel` goes on; both in one would leave
    room for few programs on a multiprocessor."""
    wait_for_previous(PDL)
    piece, line = tl.program_id(0), tl.program_id(1)
    row_params = params_ptr + tl.load(rows_ptr + line).to(tl.int64) * params_stride
    flags = tl.load(row_params + FLAGS)
    largest = tl.load(floats_ptr + line * NUM_FLOATS + MAX_COLUMN)
    if ((flags & RANKED) != 0) & (largest < float("inf")) & (largest > -float("inf")):
        is_edited = ((flags & EDITS) != 0) | (tl.load(mask_index_ptr + line) >= 0)
        wide_line = line.to(tl.int64)
        top_k = tl.load(row_params + TOP_K)
        top_p = tl.load(row_params + TOP_P).to(tl.float32, bitcast=True)
        is_complete = row_is_complete(top_k, VOCAB, CANDIDATES)
        low = tl.load(floats_ptr + line * NUM_FLOATS + LOW_COLUMN)
        high = tl.load(floats_ptr + line * NUM_FLOATS + HIGH_COLUMN)
        token = piece * SLICE + tl.arange(0, SLICE)
        x = load_logits(logits_ptr + wide_line * logits_stride, edited_ptr + wide_line * VOCAB, is_edited, token, VOCAB)
        # A large top-k with a top-p needs two borders: that is left to the slow way.
        if is_complete | (top_k <= 0) | (top_p >= 1.0):
            wanted = (x >= low) & (x < high) & (x > -float("inf"))
            append_candidates(
                packed_key(x, token, ID_BITS), wanted, line, keys_ptr, counters_ptr + counters_stride, CANDIDATES
            )
        if is_complete == 0:
            inverse = 1.0 / tl.load(row_params + TEMPERATURE).to(tl.float32, bitcast=True)
            lowest_z = min_p_bound(row_params, flags, largest, inverse)
            above = tl.where(x >= high, token_weights(x, largest, inverse, lowest_z, top_k > 0), 0)
            tl.store(totals_ptr + wide_line * SLICES + piece, tl.sum(above, 0))


@triton.jit(do_not_specialize=["out_stride"])
def settle_kernel(
    logits_ptr, edited_ptr, rows_ptr, params_ptr, mask_index_ptr, positions_ptr, counts_ptr, totals_ptr, keys_ptr,
    floats_ptr, longs_ptr, counters_ptr, out_ptr, logits_stride, params_stride, counts_stride, counters_stride,
    out_stride,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr,
    ID_BITS: tl.constexpr, CANDIDATES: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The exact border, one program for each row; a row whose few candidates are all that it can sample is sampled
    here."""
    wait_for_previous(PDL)
    line = tl.program_id(0)
    row = tl.load(rows_ptr + line).to(tl.int64)
    row_params = params_ptr + row * params_stride
    flags = tl.load(row_params + FLAGS)
    if (flags & RANKED) != 0:
        is_edited = ((flags & EDITS) != 0) | (tl.load(mask_index_ptr + line) >= 0)
        wide_line = line.to(tl.int64)
        logits_line, edited_line = logits_ptr + wide_line * logits_stride, edited_ptr + wide_line * VOCAB
        top_k = tl.load(row_params + TOP_K)
        top_p = tl.load(row_params + TOP_P).to(tl.float32, bitcast=True)
        is_complete = row_is_complete(top_k, VOCAB, CANDIDATES)
        counts = top_k > 0
        largest = tl.load(floats_ptr + line * NUM_FLOATS + MAX_COLUMN)
        low = tl.load(floats_ptr + line * NUM_FLOATS + LOW_COLUMN)
        high = tl.load(floats_ptr + line * NUM_FLOATS + HIGH_COLUMN)
        inverse = 1.0 / tl.load(row_params + TEMPERATURE).to(tl.float32, bitcast=True)
        lowest_z = min_p_bound(row_params, flags, largest, inverse)
        is_sound = (largest < float("inf")) & (largest > -float("inf"))
        collected_ptr = counters_ptr + counters_stride
        count = take_count(collected_ptr + line)
        low_key = (ordered_bits(low).to(tl.int64) << ID_BITS) - 1
        high_key = (ordered_bits(tl.minimum(high, largest)).to(tl.int64) + 1) << ID_BITS
        if is_sound == 0:
            tl.store(out_ptr + line, 0)
            tl.store(out_ptr + out_stride + line, 0)
            tl.store(longs_ptr + line * NUM_LONGS + DONE_COLUMN, 1)
        elif is_complete & (count <= MOST_SORTED):
            c = tl.arange(0, MOST_SORTED)
            keys = tl.load(
                keys_ptr + wide_line * CANDIDATES + c, mask=c < count, other=LOWEST_KEY, cache_modifier=".cg"
            )
            keys = tl.sort(keys, descending=True)
            logit = key_logit(keys, ID_BITS)
            kept = (c < count) & ((top_k == 0) | (c < top_k))
            logit = tl.where(kept, logit, -float("inf"))
            weights = token_weights(logit, largest, inverse, lowest_z, False)
            if top_p < 1.0:
                limit = _limit(tl.sum(weights, 0), top_p)
                kept = kept & (tl.cumsum(weights, 0) - weights < limit)
            kept = kept & (logit * inverse >= lowest_z)
            chosen_token = key_token(keys, ID_BITS)
            key0, key1 = noise_keys(row_params, tl.load(positions_ptr + line))
            score = logit * inverse + gumbel_noise(chosen_token, key0, key1, COMPILED)
            score = tl.where(kept, score, -float("inf"))
            best = tl.max(score, 0)
            winner = tl.min(tl.where(score == best, chosen_token, VOCAB), 0)
            winner = tl.where(winner < VOCAB, winner, 0)
            sound = (best < float("inf")) & (best > -float("inf"))
            write_token(out_ptr, out_stride, line, winner, sound, counts_ptr + row * counts_stride, flags)
            tl.store(longs_ptr + line * NUM_LONGS + DONE_COLUMN, 1)
        elif (count <= CANDIDATES) & (is_complete | (top_k <= 0) | (top_p >= 1.0)):
            c = tl.arange(0, CANDIDATES)
            keys = tl.load(
                keys_ptr + wide_line * CANDIDATES + c, mask=c < count, other=LOWEST_KEY, cache_modifier=".cg"
            )
            logit = tl.where(c < count, key_logit(keys, ID_BITS), -float("inf"))
            border = low_key
            if counts:
                weights = token_weights(logit, largest, inverse, lowest_z, True)
                above = tl.full((), 0, tl.int64)
                if is_complete == 0:
                    s = tl.arange(0, SLICES_PADDED)
                    parts = tl.load(totals_ptr + wide_line * SLICES + s, mask=s < SLICES, other=0, cache_modifier=".cg")
                    above = tl.sum(parts, 0)
                border = _border_in(keys, weights, above, top_k.to(tl.int64), low_key, high_key)
            if top_p < 1.0:
                weights = token_weights(logit, largest, inverse, lowest_z, False)
                weights = tl.where(keys >= border, weights, 0)
                above = tl.full((), 0, tl.int64)
                total = tl.sum(weights, 0)
                if is_complete == 0:
                    s = tl.arange(0, SLICES_PADDED)
                    parts = tl.load(totals_ptr + wide_line * SLICES + s, mask=s < SLICES, other=0, cache_modifier=".cg")
                    above = tl.sum(parts, 0)
                    total = tl.load(longs_ptr + line * NUM_LONGS + TOTAL_COLUMN)
                border = _border_in(keys, weights, above, _limit(total, top_p), border, high_key)
            tl.store(longs_ptr + line * NUM_LONGS + BORDER_COLUMN, border)
        else:
            border = (ordered_bits(tl.full((), -float("inf"), tl.float32)).to(tl.int64)) << ID_BITS
            if counts:
                border = _border_of_row(
                    logits_line, edited_line, is_edited, top_k.to(tl.int64), border, high_key, largest, inverse,
                    lowest_z, True, ID_BITS, VOCAB, SLICE,
                )  # fmt: skip
            if top_p < 1.0:
                total = _weight_from(
                    logits_line, edited_line, is_edited, border, largest, inverse, lowest_z, False, ID_BITS, VOCAB,
                    SLICE,
                )  # fmt: skip
                border = _border_of_row(
                    logits_line, edited_line, is_edited, _limit(total, top_p), border, high_key, largest, inverse,
                    lowest_z, False, ID_BITS, VOCAB, SLICE,
                )  # fmt: skip
            tl.store(longs_ptr + line * NUM_LONGS + BORDER_COLUMN, border)


@triton.jit
def _limit(total, top_p):
    """Top-p keeps tokens until their weights have come to this."""
    return tl.maximum((total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _border_in(keys, weights, above, limit, low, high):
    """The largest key from which on all weights, `above` included, come to the limit; `low` where none does."""
    # The border is one of the keys. Few logits lie in a bracket, so that they leave half as many bits to search.
    last = tl.max(keys, 0)
    if last > LOWEST_KEY:
        first = tl.min(tl.where(keys > LOWEST_KEY, keys, last), 0)
        low, high = tl.maximum(low, first - 1), tl.minimum(high, last + 1)
    while low + 1 < high:
        middle = low + ((high - low) >> 1)
        enough = above + tl.sum(tl.where(keys >= middle, weights, 0), 0) >= limit
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _weight_from(
    logits_line, edited_line, is_edited, border, largest, inverse, lowest_z, counts, ID_BITS: tl.constexpr,
    VOCAB: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """The weights of a whole row from a key on."""
    total = tl.full((), 0, tl.int64)
    for start in range(0, VOCAB, SLICE):
        token = start + tl.arange(0, SLICE)
        x = load_logits(logits_line, edited_line, is_edited, token, VOCAB)
        weights = token_weights(x, largest, inverse, lowest_z, counts)
        total += tl.sum(tl.where(packed_key(x, token, ID_BITS) >= border, weights, 0), 0)
    return total


@triton.jit
def _border_of_row(
    logits_line, edited_line, is_edited, limit, low, high, largest, inverse, lowest_z, counts, ID_BITS: tl.constexpr,
    VOCAB: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """`_border_in` for a row with too many candidates: it is read again and again."""
    while low + 1 < high:
        middle = low + ((high - low) >> 1)
        found = _weight_from(
            logits_line, edited_line, is_edited, middle, largest, inverse, lowest_z, counts, ID_BITS, VOCAB, SLICE
        )
        enough = found >= limit
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low
