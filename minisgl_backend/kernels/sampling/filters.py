"""Second stage of sampling: min-p, top-k and top-p. They find the border of the tokens to keep, without sorting a row.

In order: min-p (Nguyen et al. 2024), top-k, top-p (Holtzman et al. 2019) on what top-k left. Min-p only needs the
largest logit. The other two keep all tokens from a border on, by logit and then by token id, and four kernels close in
on it; launch.py says what each does.

The search is the multi-pivot search of FlashInfer's sorting-free sampling, down to a bracket with few tokens in it.
`collect_kernel` reads the row a last time: tokens above the bracket are kept in any case, so that it draws from them at
once. `settle_kernel` searches the keys of those in the bracket, int64 of a logit and a token id, with weights that are
integers, so that the border is exact, draws from what that keeps, and takes the better of both tokens. There are two
exceptions. Where the few candidates are all that a row can sample, they are sorted. Where there are too many, or a
large top-k and a top-p need two borders, the row is read again and again, and `sample_kernel` draws its token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl_backend.kernels.sampling.common import (
    BORDER_COLUMN,
    DONE_COLUMN,
    EDITS,
    FILTERS,
    FLAGS,
    HIGH_COLUMN,
    LOW_COLUMN,
    LOWEST_KEY,
    MASS_COLUMN,
    MAX_COLUMN,
    MOST_SORTED,
    NARROW_COLUMN,
    NUM_FLOATS,
    NUM_LONGS,
    RANKED,
    SMALL_TOP_K,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    append_candidates,
    arrives_last,
    key_logit,
    key_token,
    kth_group,
    load_logits,
    min_p_bound,
    ordered_bits,
    packed_key,
    relative_probability,
    row_is_complete,
    take_count,
    token_weights,
    wait_for_previous,
)
from minisgl_backend.kernels.sampling.draw import gumbel_score, noise_keys, write_token

_WAYS = tl.constexpr(4)  # parts into which each step of the search for the exact border cuts what is left


@triton.jit
def stats_kernel(
    logits_ptr, edited_ptr, rows_ptr, params_ptr, mask_index_ptr, maxima_ptr, minima_ptr, floats_ptr, longs_ptr,
    counters_ptr, logits_stride, params_stride,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The largest logit, and a bracket [low, high) around the border of top-k and top-p."""
    wait_for_previous(PDL)
    piece, line, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row_params = params_ptr + tl.load(rows_ptr + line).to(tl.int64) * params_stride
    flags = tl.load(row_params + FLAGS)
    if (flags & FILTERS) != 0:
        is_edited = ((flags & EDITS) != 0) | (tl.load(mask_index_ptr + line) >= 0)
        wide_line = line.to(tl.int64)
        logits_line, edited_line = logits_ptr + wide_line * logits_stride, edited_ptr + wide_line * VOCAB
        smallest = tl.full((), float("inf"), tl.float32)
        for part in range(piece, SLICES, programs):
            token = part * SLICE + tl.arange(0, SLICE)
            x = load_logits(logits_line, edited_line, is_edited, token, VOCAB)
            x = tl.where(x != x, float("inf"), x)  # a row with NaN is unsound
            maxima = tl.max(tl.reshape(x, [GROUPS, SLICE // GROUPS]), 1)
            tl.store(maxima_ptr + (wide_line * SLICES + part) * GROUPS + tl.arange(0, GROUPS), maxima)
            smallest = tl.minimum(smallest, tl.min(tl.where(x > -float("inf"), x, float("inf")), 0))
        tl.store(minima_ptr + wide_line * SLICES + piece, smallest)
        if arrives_last(counters_ptr, line, programs):
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
                        minima_ptr + wide_line * SLICES + s, mask=s < programs, other=float("inf"), cache_modifier=".cg"
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
    logits_ptr, edited_ptr, rows_ptr, params_ptr, mask_index_ptr, sums_ptr, masses_ptr, floats_ptr, longs_ptr,
    counters_ptr, logits_stride, params_stride,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr,
    FIRST: tl.constexpr, PIVOTS: tl.constexpr, CANDIDATES: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Makes the bracket PIVOTS + 1 times narrower, unless it is narrow enough already.

    Sums are float32 here: a pivot that their rounding leaves undecided stays inside the bracket.
    """
    wait_for_previous(PDL)
    piece, line, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row_params = params_ptr + tl.load(rows_ptr + line).to(tl.int64) * params_stride
    flags = tl.load(row_params + FLAGS)
    top_k = tl.load(row_params + TOP_K)
    top_p = tl.load(row_params + TOP_P).to(tl.float32, bitcast=True)
    is_complete = row_is_complete(top_k, VOCAB, CANDIDATES)
    largest = tl.load(floats_ptr + line * NUM_FLOATS + MAX_COLUMN)
    counts = top_k > 0
    searches = ((flags & RANKED) != 0) & (is_complete == 0) & ((top_k <= 0) | (top_p >= 1.0))
    if not FIRST:
        searches = searches & (tl.load(longs_ptr + line * NUM_LONGS + NARROW_COLUMN) == 0)
    if searches & (largest < float("inf")) & (largest > -float("inf")):
        is_edited = ((flags & EDITS) != 0) | (tl.load(mask_index_ptr + line) >= 0)
        wide_line = line.to(tl.int64)
        logits_line, edited_line = logits_ptr + wide_line * logits_stride, edited_ptr + wide_line * VOCAB
        inverse = 1.0 / tl.load(row_params + TEMPERATURE).to(tl.float32, bitcast=True)
        lowest_z = min_p_bound(row_params, flags, largest, inverse)
        low = tl.load(floats_ptr + line * NUM_FLOATS + LOW_COLUMN)
        high = tl.load(floats_ptr + line * NUM_FLOATS + HIGH_COLUMN)
        step = (tl.minimum(high, largest) - low) * (1.0 / (PIVOTS + 1))
        # Few bits, so that its multiples are exact: a pivot is then the same wherever it is computed.
        step = (step.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
        # Every thread adds up its own tokens; threads exchange their sums once, after the last slice.
        whole = tl.zeros([THREADS], tl.float32)
        parts = ()
        for _ in tl.static_range(PIVOTS):
            parts = parts + (tl.zeros([THREADS], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        for part in range(piece, SLICES, programs):
            token = part * SLICE + tl.arange(0, SLICE)
            x = load_logits(logits_line, edited_line, is_edited, token, VOCAB)
            weights = tl.where(counts, 1.0, relative_probability(x, largest, inverse))
            weights = tl.where((x > -float("inf")) & (x * inverse >= lowest_z), weights, 0.0)
            x = _by_thread(x, SLICE, THREADS)
            weights = _by_thread(weights, SLICE, THREADS)
            if FIRST:
                whole += tl.sum(tl.sum(weights, 2), 0)
            sums = ()
            for i in tl.static_range(PIVOTS):
                heavy = tl.where(x >= low + step * (i + 1), weights, 0.0)
                sums = sums + (parts[i] + tl.sum(tl.sum(heavy, 2), 0),)  # type: ignore[assignment]  # noqa: RUF005
            parts = sums
        pivot = tl.arange(0, PIVOTS)
        pivots = low + step * (pivot + 1).to(tl.float32)
        table = tl.zeros([PIVOTS, THREADS], tl.float32)
        for i in tl.static_range(PIVOTS):
            table = tl.where(pivot[:, None] == i, parts[i][None, :], table)
        tl.store(sums_ptr + (wide_line * SLICES + piece) * PIVOTS + pivot, tl.sum(table, 1))
        if FIRST:
            tl.store(masses_ptr + wide_line * SLICES + piece, tl.sum(whole, 0))
        if arrives_last(counters_ptr, line, programs):
            s = tl.arange(0, SLICES_PADDED)
            if FIRST:
                masses = tl.load(
                    masses_ptr + wide_line * SLICES + s, mask=s < programs, other=0.0, cache_modifier=".cg"
                )  # fmt: skip
                mass = tl.sum(masses, 0)
                tl.store(floats_ptr + line * NUM_FLOATS + MASS_COLUMN, mass)
            else:
                mass = tl.load(floats_ptr + line * NUM_FLOATS + MASS_COLUMN)
            limit = tl.where(counts, top_k.to(tl.float32), mass * top_p)
            at = sums_ptr + (wide_line * SLICES + s[None, :]) * PIVOTS + pivot[:, None]
            above = tl.sum(tl.load(at, mask=(s < programs)[None, :], other=0.0, cache_modifier=".cg"), 1)
            enough, too_few = above >= limit * 1.000006, above < limit * 0.999994
            new_low = tl.max(tl.where(enough, pivots, low), 0)
            new_high = tl.min(tl.where(too_few, pivots, high), 0)
            tl.store(floats_ptr + line * NUM_FLOATS + LOW_COLUMN, new_low)
            tl.store(floats_ptr + line * NUM_FLOATS + HIGH_COLUMN, new_high)
            # No token in the bracket weighs less than one at its lower end, which bounds their number.
            inside = tl.min(tl.where(enough, above, mass), 0) - tl.max(tl.where(too_few, above, 0.0), 0)
            lightest = tl.where(counts, 1.0, relative_probability(new_low, largest, inverse))
            is_narrow = inside <= lightest * (CANDIDATES // 2)
            tl.store(longs_ptr + line * NUM_LONGS + NARROW_COLUMN, is_narrow.to(tl.int64))


@triton.jit
def _by_thread(x, SLICE: tl.constexpr, THREADS: tl.constexpr):
    """Reshapes a slice to [loads of a thread, threads, numbers of one load]."""
    each: tl.constexpr = min(8, SLICE // THREADS)
    return tl.reshape(x, [SLICE // (each * THREADS), THREADS, each])


@triton.jit
def collect_kernel(
    logits_ptr, edited_ptr, rows_ptr, params_ptr, mask_index_ptr, positions_ptr, totals_ptr, values_ptr, tokens_ptr,
    keys_ptr, floats_ptr, counters_ptr, logits_stride, params_stride, counters_stride,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr,
    CHUNK: tl.constexpr, ID_BITS: tl.constexpr, CANDIDATES: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Collects the tokens in the bracket. Those above it are kept in any case: it stores their weight and best score.

    `settle_kernel` goes on; both in one would leave room for few programs on a multiprocessor.
    """
    wait_for_previous(PDL)
    piece, line, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row_params = params_ptr + tl.load(rows_ptr + line).to(tl.int64) * params_stride
    flags = tl.load(row_params + FLAGS)
    largest = tl.load(floats_ptr + line * NUM_FLOATS + MAX_COLUMN)
    top_k = tl.load(row_params + TOP_K)
    top_p = tl.load(row_params + TOP_P).to(tl.float32, bitcast=True)
    is_complete = row_is_complete(top_k, VOCAB, CANDIDATES)
    # A large top-k with a top-p needs two borders: that is left to the slow way.
    is_mine = ((flags & RANKED) != 0) & (is_complete | (top_k <= 0) | (top_p >= 1.0))
    if is_mine & (largest < float("inf")) & (largest > -float("inf")):
        is_edited = ((flags & EDITS) != 0) | (tl.load(mask_index_ptr + line) >= 0)
        wide_line = line.to(tl.int64)
        logits_line, edited_line = logits_ptr + wide_line * logits_stride, edited_ptr + wide_line * VOCAB
        low = tl.load(floats_ptr + line * NUM_FLOATS + LOW_COLUMN)
        high = tl.load(floats_ptr + line * NUM_FLOATS + HIGH_COLUMN)
        inverse = 1.0 / tl.load(row_params + TEMPERATURE).to(tl.float32, bitcast=True)
        lowest_z = min_p_bound(row_params, flags, largest, inverse)
        if is_complete:
            for part in range(piece, (VOCAB + CHUNK - 1) // CHUNK, programs):
                token = part * CHUNK + tl.arange(0, CHUNK)
                x = load_logits(logits_line, edited_line, is_edited, token, VOCAB)
                wanted = (x >= low) & (x > -float("inf"))
                append_candidates(x, token, wanted, line, keys_ptr, counters_ptr + counters_stride, ID_BITS, CANDIDATES)
        else:
            key0, key1 = noise_keys(row_params, tl.load(positions_ptr + line))
            best = tl.full([CHUNK], -float("inf"), tl.float32)
            winner = tl.full([CHUNK], VOCAB, tl.int32)
            total = tl.full((), 0, tl.int64)
            total_above = tl.full((), 0, tl.int64)
            for part in range(piece, (VOCAB + CHUNK - 1) // CHUNK, programs):
                token = part * CHUNK + tl.arange(0, CHUNK)
                x = load_logits(logits_line, edited_line, is_edited, token, VOCAB)
                kept = (x > -float("inf")) & (x * inverse >= lowest_z)
                wanted = kept & (x >= low) & (x < high)
                append_candidates(x, token, wanted, line, keys_ptr, counters_ptr + counters_stride, ID_BITS, CANDIDATES)
                weights = token_weights(x, largest, inverse, lowest_z, top_k > 0)
                total += tl.sum(weights, 0)
                total_above += tl.sum(tl.where(x >= high, weights, 0), 0)
                score = gumbel_score(x, inverse, token, key0, key1, COMPILED)
                score = tl.where(kept & (x >= high), score, -float("inf"))
                # At each index tokens ascend, so that of equal scores the lowest token stays.
                winner = tl.where(score > best, token, winner)
                best = tl.maximum(score, best)
            top_here = tl.max(best, 0)
            tl.store(values_ptr + wide_line * SLICES + piece, top_here)
            tl.store(tokens_ptr + wide_line * SLICES + piece, tl.min(tl.where(best == top_here, winner, VOCAB), 0))
            tl.store(totals_ptr + 2 * (wide_line * SLICES + piece), total_above)
            tl.store(totals_ptr + 2 * (wide_line * SLICES + piece) + 1, total)


@triton.jit(do_not_specialize=["out_stride", "programs"])
def settle_kernel(
    logits_ptr, edited_ptr, rows_ptr, params_ptr, mask_index_ptr, positions_ptr, counts_ptr, totals_ptr, values_ptr,
    tokens_ptr, keys_ptr, floats_ptr, longs_ptr, counters_ptr, out_ptr, logits_stride, params_stride, counts_stride,
    counters_stride, out_stride, programs,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr,
    ID_BITS: tl.constexpr, CANDIDATES: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Finds the exact border, one program for each row, and the token of a row with few candidates: the best of those
    that the border keeps and of the tokens above the bracket."""
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
            score = gumbel_score(logit, inverse, chosen_token, key0, key1, COMPILED)
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
            above = tl.full((), 0, tl.int64)
            total = tl.full((), 0, tl.int64)
            s = tl.arange(0, SLICES_PADDED)
            if is_complete == 0:
                at, s_ok = totals_ptr + 2 * (wide_line * SLICES + s), s < programs
                above = tl.sum(tl.load(at, mask=s_ok, other=0, cache_modifier=".cg"), 0)
                total = tl.sum(tl.load(at + 1, mask=s_ok, other=0, cache_modifier=".cg"), 0)
            if counts:
                weights = token_weights(logit, largest, inverse, lowest_z, True)
                border = _border_in(keys, weights, above, top_k.to(tl.int64), low_key, high_key)
            if top_p < 1.0:
                weights = token_weights(logit, largest, inverse, lowest_z, False)
                weights = tl.where(keys >= border, weights, 0)
                if is_complete:
                    total = tl.sum(weights, 0)
                border = _border_in(keys, weights, above, _limit(total, top_p), border, high_key)
            key0, key1 = noise_keys(row_params, tl.load(positions_ptr + line))
            chosen_token = key_token(keys, ID_BITS)
            score = gumbel_score(logit, inverse, chosen_token, key0, key1, COMPILED)
            kept = (c < count) & (keys >= border) & (logit * inverse >= lowest_z)
            score = tl.where(kept, score, -float("inf"))
            best = tl.max(score, 0)
            winner = tl.min(tl.where(score == best, chosen_token, VOCAB), 0)
            if is_complete == 0:
                at, s_ok = wide_line * SLICES + s, s < programs
                values = tl.load(values_ptr + at, mask=s_ok, other=-float("inf"), cache_modifier=".cg")
                tokens = tl.load(tokens_ptr + at, mask=s_ok, other=VOCAB, cache_modifier=".cg")
                best_above = tl.max(values, 0)
                winner_above = tl.min(tl.where(values == best_above, tokens, VOCAB), 0)
                winner = tl.where(best_above > best, winner_above, winner)
                winner = tl.where(best_above == best, tl.minimum(winner, winner_above), winner)
                best = tl.maximum(best, best_above)
            winner = tl.where(winner < VOCAB, winner, 0)
            sound = (best < float("inf")) & (best > -float("inf"))
            write_token(out_ptr, out_stride, line, winner, sound, counts_ptr + row * counts_stride, flags)
            tl.store(longs_ptr + line * NUM_LONGS + DONE_COLUMN, 1)
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
    """The sum of weights at which top-p stops keeping tokens."""
    return tl.maximum((total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _border_in(keys, weights, above, limit, low, high):
    """The largest key for which its weight and those of all larger keys, plus `above`, reach `limit`; else `low`."""
    # The border is one of the keys. The logits of a bracket are close together, which halves the bits to search.
    last = tl.max(keys, 0)
    if last > LOWEST_KEY:
        first = tl.min(tl.where(keys > LOWEST_KEY, keys, last), 0)
        low, high = tl.maximum(low, first - 1), tl.minimum(high, last + 1)
    way = (tl.arange(0, _WAYS) + 1).to(tl.int64)  # the last is `high` itself
    while low + 1 < high:
        middles = low + ((high - low) * way) // _WAYS
        found = tl.sum(tl.where(keys[None, :] >= middles[:, None], weights[None, :], 0), 1)
        enough = (above + found >= limit) & (middles < high)
        first_not = tl.min(tl.where(enough, high, middles), 0)
        low = tl.max(tl.where(enough, middles, low), 0)
        high = first_not
    return low


@triton.jit
def _weight_from(
    logits_line, edited_line, is_edited, border, largest, inverse, lowest_z, counts, ID_BITS: tl.constexpr,
    VOCAB: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Sum of the weights of all tokens of a row whose key is at least `border`."""
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
