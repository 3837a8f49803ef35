"""Shared by the stages of sampling: the order of tokens, their weights, and how the programs of a row synchronise.

launch.py lists the stages in order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.sampling import layout

MOST_SORTED = tl.constexpr(128)  # candidates that are sorted

TEMPERATURE = tl.constexpr(layout.TEMPERATURE)
TOP_K = tl.constexpr(layout.TOP_K)
TOP_P = tl.constexpr(layout.TOP_P)
_MIN_P = tl.constexpr(layout.MIN_P)
FLAGS = tl.constexpr(layout.FLAGS)
_USES_MIN_P = tl.constexpr(layout.USES_MIN_P)
RANKED = tl.constexpr(layout.RANKED)
PENALTIES = tl.constexpr(layout.PENALTIES)
EDITS = tl.constexpr(layout.EDITS)
FILTERS = tl.constexpr(layout.FILTERS)
SMALL_TOP_K = tl.constexpr(layout.SMALL_TOP_K)
MOST_ANSWERED = tl.constexpr(layout.MOST_ANSWERED)

# Columns of the workspace's state, one entry for each row of a step.
MAX_COLUMN, LOW_COLUMN, HIGH_COLUMN, MASS_COLUMN, NUM_FLOATS = (tl.constexpr(column) for column in range(5))
BORDER_COLUMN, DONE_COLUMN, NARROW_COLUMN, NUM_LONGS = (tl.constexpr(column) for column in range(4))

WEIGHT_UNIT = tl.constexpr(float(1 << 40))  # of probabilities relative to the largest
LOWEST_KEY = tl.constexpr(-(1 << 62))  # below every key


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Every kernel here reads what the one before it wrote, so that only its start overlaps with that one's end."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()


@triton.jit
def arrives_last(counters_ptr, line, programs):
    """True for the last program of a row to arrive; it sees what the others have stored."""
    tl.debug_barrier()
    last = tl.atomic_add(counters_ptr + line, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(counters_ptr + line, 0)
    return last


@triton.jit
def load_logits(logits_line, edited_line, is_edited, token, VOCAB: tl.constexpr):
    ok = token < VOCAB
    if is_edited:
        x = tl.load(edited_line + token, mask=ok, other=-float("inf"))
    else:
        x = tl.load(logits_line + token, mask=ok, other=-float("inf")).to(tl.float32)
    return x


@triton.jit
def ordered_bits(x):
    """float32 -> int32 in the same order; 0.0 and -0.0 are equal."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) == 0, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def packed_key(x, token, ID_BITS: tl.constexpr):
    """int64 that orders tokens by logit; of equal logits the lower token id has the greater key."""
    return (ordered_bits(x).to(tl.int64) << ID_BITS) | ((1 << ID_BITS) - 1 - token).to(tl.int64)


@triton.jit
def key_token(key, ID_BITS: tl.constexpr):
    return ((1 << ID_BITS) - 1 - (key & ((1 << ID_BITS) - 1))).to(tl.int32)


@triton.jit
def key_logit(key, ID_BITS: tl.constexpr):
    order = (key >> ID_BITS).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def min_p_bound(row_params, flags, largest, inverse):
    """The logit / temperature below which min-p drops tokens."""
    lowest = -float("inf")
    if (flags & _USES_MIN_P) != 0:
        # An explicit fma, so that every kernel rounds it in the same way.
        lowest = tl.fma(largest, inverse, tl.log(tl.load(row_params + _MIN_P).to(tl.float32, bitcast=True)))
    return lowest


@triton.jit
def relative_probability(x, largest, inverse):
    """Probability divided by that of the largest logit. Bit for bit the same in every kernel, since the compiler can
    form no fma here: the border does not depend on which kernel weighed which tokens."""
    return tl.exp((x - largest) * inverse)


@triton.jit
def token_weights(x, largest, inverse, lowest_z, counts):
    """What top-p adds up, int64: probabilities relative to the largest; or 1 for each token where top-k `counts`."""
    weights = (relative_probability(x, largest, inverse) * WEIGHT_UNIT).to(tl.int64)
    weights = tl.where(counts, 1, weights)
    return tl.where((x > -float("inf")) & (x * inverse >= lowest_z), weights, 0)


@triton.jit
def row_is_complete(top_k, VOCAB: tl.constexpr, CANDIDATES: tl.constexpr):
    """See `layout.is_complete`."""
    complete = (top_k > 0) & (top_k <= SMALL_TOP_K)
    if VOCAB <= CANDIDATES:
        complete = top_k >= 0
    return complete


@triton.jit
def kth_group(groups, k, GROUPS_PADDED: tl.constexpr):
    """The k-th largest of the groups' maxima, 1 <= k."""
    ordered = tl.sort(groups, descending=True)
    chosen = tl.arange(0, GROUPS_PADDED) == k - 1
    return tl.max(tl.where(chosen, ordered, -float("inf")), 0)


@triton.jit
def append_candidates(x, token, wanted, line, keys_ptr, collected_ptr, ID_BITS: tl.constexpr, CANDIDATES: tl.constexpr):
    """Adds the keys of the selected tokens to a row's candidates, in any order; also counts those that do not fit."""
    count = tl.sum(wanted.to(tl.int32), 0)
    if count > 0:
        place = tl.atomic_add(collected_ptr + line, count, sem="relaxed") + tl.cumsum(wanted.to(tl.int32), 0) - 1
        keys = packed_key(x, token, ID_BITS)
        tl.store(keys_ptr + line.to(tl.int64) * CANDIDATES + place, keys, mask=wanted & (place < CANDIDATES))


@triton.jit
def take_count(collected_ptr):
    """Reads the number of candidates and resets it to zero.

    An atomic exchange, whose result every thread of the program gets. With a load and a store, a thread that loads
    after another's store would read 0.
    """
    return tl.atomic_xchg(collected_ptr, 0)
