"""Last stage of sampling: temperature, noise, argmax over the tokens that are left; and the counts for penalties.

The Gumbel-max trick: argmax(logit / temperature + noise) has the softmax's distribution, so nothing is normalised.
The noise is a hash of (seed, position, token id), which sampling/gumbel.py explains; a temperature of 0 has none. For
most rows this is the only kernel, inside the captured graph.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl_backend.kernels.sampling import layout
from minisgl_backend.kernels.sampling.common import (
    BORDER_COLUMN,
    DONE_COLUMN,
    EDITS,
    FILTERS,
    FLAGS,
    MAX_COLUMN,
    MOST_ANSWERED,
    NUM_FLOATS,
    NUM_LONGS,
    PENALTIES,
    RANKED,
    TEMPERATURE,
    arrives_last,
    load_logits,
    min_p_bound,
    packed_key,
    wait_for_previous,
)

_SEED_LOW = tl.constexpr(layout.SEED_LOW)
_SEED_HIGH = tl.constexpr(layout.SEED_HIGH)
_EXTENDED = tl.constexpr(layout.EXTENDED)


@triton.jit(do_not_specialize=["out_stride"])
def sample_kernel(
    logits_ptr, edited_ptr, rows_ptr, positions_ptr, params_ptr, mask_index_ptr, counts_ptr, values_ptr, tokens_ptr,
    floats_ptr, longs_ptr, counters_ptr, out_ptr, logits_stride, params_stride, out_stride,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr,
    ID_BITS: tl.constexpr, THIS_IS_EXTENDED: tl.constexpr, PDL: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Temperature, noise and argmax: of the rows that need nothing else, or of the others that have no token yet."""
    wait_for_previous(PDL)
    piece, line, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row = tl.load(rows_ptr + line).to(tl.int64)
    row_params = params_ptr + row * params_stride
    flags = tl.load(row_params + FLAGS)
    is_extended = (flags & _EXTENDED) != 0
    is_edited = False
    if THIS_IS_EXTENDED:
        is_edited = ((flags & EDITS) != 0) | (tl.load(mask_index_ptr + line) >= 0)
        is_mine = is_extended | is_edited
        if (flags & RANKED) != 0:
            is_mine = is_mine & (tl.load(longs_ptr + line * NUM_LONGS + DONE_COLUMN) == 0)
    else:
        is_mine = is_extended == 0
        if is_extended & (piece == 0):
            tl.store(out_ptr + line, 0)
            tl.store(out_ptr + out_stride + line, 1)
    if is_mine:
        wide_line = line.to(tl.int64)
        inputs = (
            logits_ptr + wide_line * logits_stride, edited_ptr + wide_line * VOCAB, is_edited, row_params, flags,
            positions_ptr + line, floats_ptr + line * NUM_FLOATS, longs_ptr + line * NUM_LONGS,
        )  # fmt: skip
        best, winner = _best_of_slice(*inputs, piece, VOCAB, SLICE, ID_BITS, THIS_IS_EXTENDED, COMPILED)
        if THIS_IS_EXTENDED:  # the other kernel has a program for each slice, and more registers would slow it down
            for part in range(piece + programs, SLICES, programs):
                score, token = _best_of_slice(*inputs, part, VOCAB, SLICE, ID_BITS, THIS_IS_EXTENDED, COMPILED)
                # Slices ascend, so that of equal scores the lowest token stays.
                winner = tl.where(score > best, token, winner)
                best = tl.maximum(score, best)
        tl.store(values_ptr + line * SLICES + piece, best)
        tl.store(tokens_ptr + line * SLICES + piece, winner)
        if arrives_last(counters_ptr, line, programs):
            s = tl.arange(0, SLICES_PADDED)
            s_ok = s < programs
            values = tl.load(values_ptr + line * SLICES + s, mask=s_ok, other=-float("inf"), cache_modifier=".cg")
            tokens = tl.load(tokens_ptr + line * SLICES + s, mask=s_ok, other=VOCAB, cache_modifier=".cg")
            top = tl.max(values, 0)
            chosen = tl.min(tl.where(values == top, tokens, VOCAB), 0)
            chosen = tl.where(chosen < VOCAB, chosen, 0)
            sound = (top < float("inf")) & (top > -float("inf"))
            if THIS_IS_EXTENDED:
                write_token(out_ptr, out_stride, line, chosen, sound, counts_ptr + row * VOCAB, flags)
            else:
                tl.store(out_ptr + line, chosen)
                tl.store(out_ptr + out_stride + line, sound.to(tl.int32))


@triton.jit
def _best_of_slice(
    logits_line, edited_line, is_edited, row_params, flags, position_ptr, row_floats, row_longs, part,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, ID_BITS: tl.constexpr, THIS_IS_EXTENDED: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """The best score of a slice, and the lowest token that has it."""
    temperature = tl.load(row_params + TEMPERATURE).to(tl.float32, bitcast=True)
    token = part * SLICE + tl.arange(0, SLICE)
    if THIS_IS_EXTENDED:
        x = load_logits(logits_line, edited_line, is_edited, token, VOCAB)
    else:
        x = tl.load(logits_line + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32)
    score = x
    if temperature != 0.0:
        key0, key1 = noise_keys(row_params, tl.load(position_ptr))
        inverse = 1.0 / temperature
        score = gumbel_score(x, inverse, token, key0, key1, COMPILED)
        if THIS_IS_EXTENDED:  # noqa: SIM102  known when it is compiled
            if (flags & FILTERS) != 0:
                border = tl.load(row_longs + BORDER_COLUMN)
                lowest_z = min_p_bound(row_params, flags, tl.load(row_floats + MAX_COLUMN), inverse)
                kept = (x * inverse >= lowest_z) & (packed_key(x, token, ID_BITS) >= border)
                score = tl.where(kept | (x != x), score, -float("inf"))
    score = tl.where(token < VOCAB, score, -float("inf"))
    unsound = tl.sum((score != score).to(tl.int32), 0) > 0
    best = tl.max(score, 0)
    winner = tl.min(tl.where(score == best, token, VOCAB), 0)
    # A NaN anywhere marks the whole row: +inf wins every comparison and is reported as unsound.
    return tl.where(unsound, float("inf"), best), tl.where(unsound, 0, winner)


@triton.jit
def noise_keys(row_params, position):
    low = tl.load(row_params + _SEED_LOW).to(tl.uint32, bitcast=True)
    high = tl.load(row_params + _SEED_HIGH).to(tl.uint32, bitcast=True)
    golden = tl.full([1], 0x9E3779B9, tl.uint32)
    key0 = _mix(_mix(low ^ _mix(position.to(tl.uint32, bitcast=True) * golden + 1)) ^ high)
    return key0, _mix(key0 + golden)


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def gumbel_noise(token, key0, key1, COMPILED: tl.constexpr):
    """sampling.gumbel explains the hash."""
    h = (token.to(tl.uint32) * tl.full([1], 0x9E3779B9, tl.uint32)) ^ key0
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= key1
    h ^= h >> 15
    h *= 0x846CA68B
    h ^= h >> 16
    uniform = ((h & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    uniform = tl.minimum(uniform, 0.99999994)
    # log1p(-v) loses all digits near v = 0 when written as log(1 - v); the series does not.
    # log2 is one instruction; its error near 1 is what the series below is for.
    exact = _log2(1.0 - uniform, COMPILED) * -0.6931471805599453
    series = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))
    exponential = tl.where(uniform < 0.01, series, exact)
    return _log2(exponential, COMPILED) * -0.6931471805599453


@triton.jit
def gumbel_score(x, inverse, token, key0, key1, COMPILED: tl.constexpr):
    """Logit / temperature + noise, float32; rounded in the same way by every kernel, whatever else it does with
    x * inverse."""
    return tl.fma(x, inverse, gumbel_noise(token, key0, key1, COMPILED))


@triton.jit
def _log2(x, COMPILED: tl.constexpr):
    if not COMPILED:  # the interpreter knows no assembly
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def write_token(out_ptr, out_stride, line, token, sound, counts_line, flags):
    """Stores the row's token, and counts it for the penalties."""
    tl.store(out_ptr + line, token)
    tl.store(out_ptr + out_stride + line, sound.to(tl.int32))
    if (flags & PENALTIES) != 0:
        seen = tl.load(counts_line + token)
        more = (seen & MOST_ANSWERED) < MOST_ANSWERED
        tl.store(counts_line + token, (seen + more.to(tl.int16)).to(tl.int16))
