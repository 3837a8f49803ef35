"""Sampling in the Triton language: no copy of the logits is sorted and no step launches more than a few kernels.

Every kernel runs on a grid of (slices of the vocabulary, rows). What its slices find of a row is put together by the
program of that row that arrives last. Rows that do not need a kernel leave it at once. In order:

    edit      penalties and grammar masks, into float32 logits of their own; then the rules of single tokens
    stats     the largest logit, and the largest of each of some 512 groups. The k-th largest of these is at most the
              k-th largest logit, and only few logits are above it
    search    top-p and large top-k: how much probability is above each of a few pivots; two or three such rounds
              bring the border into a narrow bracket (multi-pivot search as in FlashInfer's sorting-free sampling)
    collect   the tokens in that bracket
    settle    the exact border among them, found in the registers of one program for each row
    sample    temperature, Gumbel noise and argmax over what is above the border

Probabilities are summed as integers (exp(z - max) in units of 2**-40), so that a border does not depend on the order of
summation. Tokens are ranked by logit and then by token id, the lower one first. What is kept is therefore exactly what
`minisgl_backend.sampling.sampler` keeps, whatever the other rows of a batch are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels import sampling_layout as layout

_SLICE = 2048
_GROUPS = 512  # at least, where the vocabulary is that large
_PIVOTS = 8
_ROUNDS = 3
_FEW = tl.constexpr(128)  # candidates that are sorted
_MOST_TOP = tl.constexpr(32)  # alternatives of log-probabilities, at most

_TEMPERATURE = tl.constexpr(layout.TEMPERATURE)
_TOP_K = tl.constexpr(layout.TOP_K)
_TOP_P = tl.constexpr(layout.TOP_P)
_MIN_P = tl.constexpr(layout.MIN_P)
_REPETITION = tl.constexpr(layout.REPETITION)
_PRESENCE = tl.constexpr(layout.PRESENCE)
_FREQUENCY = tl.constexpr(layout.FREQUENCY)
_SEED_LOW = tl.constexpr(layout.SEED_LOW)
_SEED_HIGH = tl.constexpr(layout.SEED_HIGH)
_FLAGS = tl.constexpr(layout.FLAGS)
_USES_MIN_P = tl.constexpr(layout.USES_MIN_P)
_RANKED = tl.constexpr(layout.RANKED)
_PENALTIES = tl.constexpr(layout.PENALTIES)
_RULES = tl.constexpr(layout.RULES)
_EDITS = tl.constexpr(layout.EDITS)
_FILTERS = tl.constexpr(layout.FILTERS)
_EXTENDED = tl.constexpr(layout.EXTENDED)
_SMALL_TOP_K = tl.constexpr(layout.SMALL_TOP_K)
_MOST_ANSWERED = tl.constexpr(layout.MOST_ANSWERED)
_RULE_TOKEN = tl.constexpr(layout.RULE_TOKEN)
_RULE_VALUE = tl.constexpr(layout.RULE_VALUE)
_RULE_UNTIL = tl.constexpr(layout.RULE_UNTIL)
_RULE_PREFIX = tl.constexpr(layout.RULE_PREFIX)
_RULE_PREFIX_LEN = tl.constexpr(layout.RULE_PREFIX_LEN)
_RULE_COLUMNS = tl.constexpr(layout.NUM_RULE_COLUMNS)

# Columns of the workspace's state, one line for each row of a step.
_MAX, _LOW, _HIGH, _NUM_FLOATS = (tl.constexpr(column) for column in range(4))
_TOTAL, _BORDER, _DONE, _NUM_LONGS = (tl.constexpr(column) for column in range(4))

_UNIT = tl.constexpr(float(1 << 40))  # of probabilities relative to the largest
_LOWEST = tl.constexpr(-(1 << 62))  # below every key


class SamplingWorkspace:
    """What the slices of a row leave for each other. Counters return to zero after every launch."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        slice: int = _SLICE,
        candidates: int = layout.CANDIDATES,
        pivots: int = _PIVOTS,
        rounds: int = _ROUNDS,
    ) -> None:
        self.vocab_size, self.slice, self.device = vocab_size, slice, device
        self.candidates, self.pivots, self.rounds = candidates, pivots, rounds
        self.slices = slices = triton.cdiv(vocab_size, slice)
        self.groups = min(slice // 2, triton.next_power_of_2(triton.cdiv(_GROUPS, slices)))  # of a slice
        self.id_bits = max(1, (vocab_size - 1).bit_length())

        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(max_rows, *shape, dtype=dtype, device=device)

        self.values = empty(torch.float32, slices)
        self.tokens = empty(torch.int32, slices)
        self.maxima = empty(torch.float32, slices * self.groups)
        self.minima = empty(torch.float32, slices)
        self.sums = empty(torch.float32, slices * pivots)
        self.totals = empty(torch.int64, slices)
        self.keys = empty(torch.int64, candidates)
        self.floats = empty(torch.float32, int(_NUM_FLOATS.value))
        self.longs = empty(torch.int64, int(_NUM_LONGS.value))
        self.counters = torch.zeros(2, max_rows, dtype=torch.int32, device=device)  # arrivals, collected candidates
        self.no_masks = torch.full((max_rows,), -1, dtype=torch.int32, device=device)

    def sizes(self) -> dict[str, int]:
        """What the kernels are compiled for."""
        return {
            "VOCAB": self.vocab_size,
            "SLICE": self.slice,
            "SLICES": self.slices,
            "SLICES_PADDED": triton.next_power_of_2(self.slices),
        }


@dataclass(frozen=True)
class EditInputs:
    """What changes logits before they are sampled from; all on the device."""

    tokens: torch.Tensor  # int32 [max_rows, max_seq_len + 1]  of every row, by position
    counts: torch.Tensor  # int16 [max_rows, vocab_size]  see sampling_layout.IN_PROMPT
    rule_counts: torch.Tensor  # int32 [max_rows, 2]  rules without a prefix, and all rules
    rules: torch.Tensor  # int32 [max_rows, NUM_RULE_COLUMNS, max_rules]  those without a prefix first
    prefixes: torch.Tensor  # int32 [max_rows, max_prefix_tokens]
    mask_index: torch.Tensor | None = None  # int32 [n]  line of mask_bits, or -1
    mask_bits: torch.Tensor | None = None  # int32 [k, ceil(vocab_size / 32)]  1: allowed


def sample_plain(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: torch.Tensor,
    workspace: SamplingWorkspace,
    pdl: bool = False,
    num_warps: int = 4,
) -> torch.Tensor:
    """argmax(logits / temperature + noise), or argmax(logits) where the temperature is 0.

    logits [n, vocab_size], rows and positions int32 [n], params int32 [max_rows, NUM_PARAMS]. Returns int32 [2, n]:
    tokens, then 1 where the best value is finite and 0 elsewhere. Of equal values the lowest token id wins. Rows that
    need more than temperature get token 0: `sample_extended` overwrites it.
    """
    n = logits.shape[0]
    out = torch.empty((2, n), dtype=torch.int32, device=logits.device)
    w = workspace
    extra = {"launch_pdl": True} if pdl else {}
    _sample_kernel[(w.slices, n)](
        logits, logits, rows, positions, params, w.no_masks, logits, w.values, w.tokens, w.floats, w.longs, w.counters,
        out, logits.stride(0), params.stride(0), n, **w.sizes(), ID_BITS=w.id_bits, THIS_IS_EXTENDED=False, PDL=pdl,
        COMPILED=logits.is_cuda, num_warps=num_warps, **extra,
    )  # fmt: skip
    return out


def sample_extended(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: torch.Tensor,
    edits: EditInputs,
    flags: int,
    searches: bool,
    out: torch.Tensor,
    workspace: SamplingWorkspace,
    num_warps: int = 4,
    pdl: bool = False,
) -> None:
    """Samples the rows that need more than temperature; the others keep what `out` has.

    Shapes are those of `sample_plain`. `flags`: all bits of the rows' FLAGS column, GRAMMAR where there are masks;
    `searches`: some ranked row is not `sampling_layout.is_complete`. `out` int32 [2, n or more].
    """
    n, w = logits.shape[0], workspace
    grid, sizes = (w.slices, n), w.sizes()
    mask_index = w.no_masks if edits.mask_index is None else edits.mask_index
    mask_bits = w.no_masks if edits.mask_bits is None else edits.mask_bits
    strides = (logits.stride(0), params.stride(0))
    launch = {"PDL": pdl, "num_warps": num_warps, **({"launch_pdl": True} if pdl else {})}
    edited = w.maxima  # a float32 pointer, so that kernels are compiled once; nothing reads it then
    if flags & layout.EDITS:
        edited = torch.empty(n, w.vocab_size, dtype=torch.float32, device=logits.device)
        _edit_kernel[grid](
            logits, edited, rows, params, edits.counts, mask_index, mask_bits, *strides, edits.counts.stride(0),
            VOCAB=w.vocab_size, SLICE=w.slice, **launch,
        )  # fmt: skip
    if flags & layout.RULES:
        _rules_kernel[(n,)](
            logits, edited, rows, positions, params, edits.tokens, edits.rule_counts, edits.rules, edits.prefixes,
            mask_index, mask_bits, *strides, edits.tokens.stride(0), edits.rules.stride(1), edits.prefixes.stride(0),
            VOCAB=w.vocab_size, SLICE=w.slice, **launch,
        )  # fmt: skip
    common = (logits, edited, rows, params, mask_index)
    if flags & layout.FILTERS:
        _stats_kernel[grid](
            *common, w.maxima, w.minima, w.floats, w.longs, w.counters, *strides, **sizes, GROUPS=w.groups,
            GROUPS_PADDED=triton.next_power_of_2(w.slices * w.groups), CANDIDATES=w.candidates, **launch,
        )  # fmt: skip
    if flags & layout.RANKED:
        wide = {**launch, "num_warps": 2 * num_warps}
        if searches:
            for turn in range(w.rounds):
                _search_kernel[grid](
                    *common, w.sums, w.totals, w.floats, w.longs, w.counters, *strides, **sizes, FIRST=turn == 0,
                    PIVOTS=w.pivots, CANDIDATES=w.candidates, **wide,
                )  # fmt: skip
        _collect_kernel[grid](
            *common, w.totals, w.keys, w.floats, w.counters, *strides, w.counters.stride(0), **sizes,
            ID_BITS=w.id_bits, CANDIDATES=w.candidates, **launch,
        )  # fmt: skip
        _settle_kernel[(n,)](
            *common, positions, edits.counts, w.totals, w.keys, w.floats, w.longs, w.counters, out, *strides,
            edits.counts.stride(0), w.counters.stride(0), out.stride(0), **sizes, ID_BITS=w.id_bits,
            CANDIDATES=w.candidates, COMPILED=logits.is_cuda, **wide,
        )  # fmt: skip
    _sample_kernel[grid](
        logits, edited, rows, positions, params, mask_index, edits.counts, w.values, w.tokens, w.floats, w.longs,
        w.counters, out, *strides, out.stride(0), **sizes, ID_BITS=w.id_bits, THIS_IS_EXTENDED=True,
        COMPILED=logits.is_cuda, **launch,
    )  # fmt: skip


def pack_logprobs(
    logits: torch.Tensor,
    lines: torch.Tensor,
    token_ids: torch.Tensor,
    top: int,
    workspace: SamplingWorkspace,
    num_warps: int = 4,
) -> torch.Tensor:
    """Log-probabilities of one token of each of some lines of `logits`, and the `top` most likely tokens there.

    logits [n, vocab_size], lines int32 [k], token_ids int32 [n], both by line. Returns int32 [k, 3 + 2 * top], see
    sampling.logprobs.pack. Equal logits: the lower token id first.
    """
    w, k = workspace, lines.shape[0]
    if top > _MOST_TOP.value:
        raise ValueError(f"top is {top}; allowed: at most {_MOST_TOP.value}")
    top = min(top, w.vocab_size)
    out = torch.empty(k, 3 + 2 * top, dtype=torch.int32, device=logits.device)
    step = w.floats.shape[0]
    for start in range(0, k, step):
        part, out_part = lines[start : start + step], out[start : start + step]
        grid = (w.slices, part.shape[0])
        _logprob_stats_kernel[grid](
            logits, part, w.maxima, w.values, w.minima, w.floats, w.counters, logits.stride(0), top, **w.sizes(),
            GROUPS=w.groups, GROUPS_PADDED=triton.next_power_of_2(w.slices * w.groups), num_warps=num_warps,
        )  # fmt: skip
        _logprob_collect_kernel[grid](
            logits, part, token_ids, w.tokens, w.keys, w.floats, w.counters, out_part, logits.stride(0),
            w.counters.stride(0), out.stride(0), top, **w.sizes(), ID_BITS=w.id_bits, CANDIDATES=w.candidates,
            num_warps=num_warps,
        )  # fmt: skip
    return out


# ---- what several kernels need


@triton.jit
def _wait(PDL: tl.constexpr):
    """Every kernel here reads what the one before it wrote, so that only its start overlaps with that one's end."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _log2(x, COMPILED: tl.constexpr):
    if not COMPILED:  # the interpreter knows no assembly
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _noise_keys(row_params, position):
    low = tl.load(row_params + _SEED_LOW).to(tl.uint32, bitcast=True)
    high = tl.load(row_params + _SEED_HIGH).to(tl.uint32, bitcast=True)
    golden = tl.full([1], 0x9E3779B9, tl.uint32)
    key0 = _mix(_mix(low ^ _mix(position.to(tl.uint32, bitcast=True) * golden + 1)) ^ high)
    return key0, _mix(key0 + golden)


@triton.jit
def _gumbel(token, key0, key1, COMPILED: tl.constexpr):
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
def _load_logits(logits_line, edited_line, is_edited, token, VOCAB: tl.constexpr):
    ok = token < VOCAB
    if is_edited:
        x = tl.load(edited_line + token, mask=ok, other=-float("inf"))
    else:
        x = tl.load(logits_line + token, mask=ok, other=-float("inf")).to(tl.float32)
    return x


@triton.jit
def _allowed(bits_line, token, VOCAB: tl.constexpr):
    word = tl.load(bits_line + (token >> 5), mask=token < VOCAB, other=0)
    return ((word >> (token & 31)) & 1) != 0


@triton.jit
def _order(x):
    """float32 as int32 of the same order; both zeros are one."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) == 0, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(x, token, ID_BITS: tl.constexpr):
    """int64 that orders tokens: by logit, of equal logits the lower token id is the greater."""
    return (_order(x).to(tl.int64) << ID_BITS) | ((1 << ID_BITS) - 1 - token).to(tl.int64)


@triton.jit
def _key_token(key, ID_BITS: tl.constexpr):
    return ((1 << ID_BITS) - 1 - (key & ((1 << ID_BITS) - 1))).to(tl.int32)


@triton.jit
def _key_logit(key, ID_BITS: tl.constexpr):
    order = (key >> ID_BITS).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _lowest_z(row_params, flags, largest, inverse):
    """Below it min-p drops tokens."""
    lowest = -float("inf")
    if (flags & _USES_MIN_P) != 0:
        lowest = largest * inverse + tl.log(tl.load(row_params + _MIN_P).to(tl.float32, bitcast=True))
    return lowest


@triton.jit
def _weights(x, largest, inverse, lowest_z, counts):
    """What top-p adds up, int64: probabilities relative to the largest; or 1 for each token where top-k `counts`."""
    z = x * inverse
    weights = (tl.exp(z - largest * inverse) * _UNIT).to(tl.int64)
    weights = tl.where(counts, 1, weights)
    return tl.where((x > -float("inf")) & (z >= lowest_z), weights, 0)


@triton.jit
def _is_complete(top_k, VOCAB: tl.constexpr, CANDIDATES: tl.constexpr):
    """sampling_layout.is_complete"""
    complete = (top_k > 0) & (top_k <= _SMALL_TOP_K)
    if VOCAB <= CANDIDATES:
        complete = top_k >= 0
    return complete


@triton.jit
def _limit(total, top_p):
    """Top-p keeps tokens until their weights have come to this."""
    return tl.maximum((total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _arrive(counters_ptr, line, SLICES: tl.constexpr):
    """True for the program of a row that comes last; it sees what the others have stored."""
    tl.debug_barrier()
    last = tl.atomic_add(counters_ptr + line, 1, sem="acq_rel") == SLICES - 1
    if last:
        tl.store(counters_ptr + line, 0)
    return last


@triton.jit
def _kth_group(groups, k, GROUPS_PADDED: tl.constexpr):
    """The k-th largest of the groups' maxima, k from 1 on."""
    ordered = tl.sort(groups, descending=True)
    chosen = tl.arange(0, GROUPS_PADDED) == k - 1
    return tl.max(tl.where(chosen, ordered, -float("inf")), 0)


@triton.jit
def _append(keys, wanted, line, keys_ptr, collected_ptr, CANDIDATES: tl.constexpr):
    """Adds the wanted keys of a slice to the candidates of its row, in any order; counts those that do not fit too."""
    count = tl.sum(wanted.to(tl.int32), 0)
    if count > 0:
        place = tl.atomic_add(collected_ptr + line, count, sem="relaxed") + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(keys_ptr + line.to(tl.int64) * CANDIDATES + place, keys, mask=wanted & (place < CANDIDATES))


@triton.jit
def _take_count(collected_ptr):
    """The number of candidates, which starts at zero again.

    By an atomic operation, whose result every thread of the program gets. A load would be each thread's own, and those
    that come after the store would find 0.
    """
    return tl.atomic_xchg(collected_ptr, 0)


@triton.jit
def _write(out_ptr, out_stride, line, token, sound, counts_line, flags):
    """The row's token, and one more of it for the penalties."""
    tl.store(out_ptr + line, token)
    tl.store(out_ptr + out_stride + line, sound.to(tl.int32))
    if (flags & _PENALTIES) != 0:
        seen = tl.load(counts_line + token)
        more = (seen & _MOST_ANSWERED) < _MOST_ANSWERED
        tl.store(counts_line + token, (seen + more.to(tl.int16)).to(tl.int16))


# ---- edits


@triton.jit
def _edit_kernel(
    logits_ptr, edited_ptr, rows_ptr, params_ptr, counts_ptr, mask_index_ptr, mask_bits_ptr, logits_stride,
    params_stride, counts_stride, VOCAB: tl.constexpr, SLICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    _wait(PDL)
    line = tl.program_id(1)
    row = tl.load(rows_ptr + line).to(tl.int64)
    row_params = params_ptr + row * params_stride
    flags = tl.load(row_params + _FLAGS)
    mask_index = tl.load(mask_index_ptr + line)
    if ((flags & _EDITS) != 0) | (mask_index >= 0):
        token = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
        ok = token < VOCAB
        x = tl.load(logits_ptr + line.to(tl.int64) * logits_stride + token, mask=ok, other=0.0).to(tl.float32)
        if (flags & _PENALTIES) != 0:
            repetition = tl.load(row_params + _REPETITION).to(tl.float32, bitcast=True)
            presence = tl.load(row_params + _PRESENCE).to(tl.float32, bitcast=True)
            frequency = tl.load(row_params + _FREQUENCY).to(tl.float32, bitcast=True)
            seen = tl.load(counts_ptr + row * counts_stride + token, mask=ok, other=0).to(tl.int32)
            answered = seen & _MOST_ANSWERED
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
def _rules_kernel(
    logits_ptr, edited_ptr, rows_ptr, positions_ptr, params_ptr, tokens_ptr, rule_counts_ptr, rules_ptr, prefixes_ptr,
    mask_index_ptr, mask_bits_ptr, logits_stride, params_stride, tokens_stride, max_rules, prefixes_stride,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for each row: it pays for its own rules only."""
    _wait(PDL)
    line = tl.program_id(0)
    row = tl.load(rows_ptr + line).to(tl.int64)
    flags = tl.load(params_ptr + row * params_stride + _FLAGS)
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
            if best == -float("inf"):  # where rules leave nothing of what the grammar allows, the grammar wins
                logits_line = logits_ptr + line.to(tl.int64) * logits_stride
                bits_line = mask_bits_ptr + mask_index.to(tl.int64) * ((VOCAB + 31) // 32)
                for start in range(0, VOCAB, SLICE):
                    token = start + tl.arange(0, SLICE)
                    ok = token < VOCAB
                    x = tl.load(logits_line + token, mask=ok, other=0.0).to(tl.float32)
                    x = tl.where(_allowed(bits_line, token, VOCAB), x, -float("inf"))
                    tl.store(edited_line + token, x, mask=ok)


# ---- filters


@triton.jit
def _stats_kernel(
    logits_ptr, edited_ptr, rows_ptr, params_ptr, mask_index_ptr, maxima_ptr, minima_ptr, floats_ptr, longs_ptr,
    counters_ptr, logits_stride, params_stride,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The largest logit, and a bracket [low, high) around the border of top-k and top-p."""
    _wait(PDL)
    piece, line = tl.program_id(0), tl.program_id(1)
    row_params = params_ptr + tl.load(rows_ptr + line).to(tl.int64) * params_stride
    flags = tl.load(row_params + _FLAGS)
    if (flags & _FILTERS) != 0:
        is_edited = ((flags & _EDITS) != 0) | (tl.load(mask_index_ptr + line) >= 0)
        wide_line = line.to(tl.int64)
        token = piece * SLICE + tl.arange(0, SLICE)
        x = _load_logits(
            logits_ptr + wide_line * logits_stride, edited_ptr + wide_line * VOCAB, is_edited, token, VOCAB
        )
        x = tl.where(x != x, float("inf"), x)  # such a row is unsound
        maxima = tl.max(tl.reshape(x, [GROUPS, SLICE // GROUPS]), 1)
        tl.store(maxima_ptr + (wide_line * SLICES + piece) * GROUPS + tl.arange(0, GROUPS), maxima)
        tl.store(minima_ptr + wide_line * SLICES + piece, tl.min(tl.where(x > -float("inf"), x, float("inf")), 0))
        if _arrive(counters_ptr, line, SLICES):
            g = tl.arange(0, GROUPS_PADDED)
            groups = tl.load(
                maxima_ptr + wide_line * SLICES * GROUPS + g, mask=g < SLICES * GROUPS, other=-float("inf"),
                cache_modifier=".cg",
            )  # fmt: skip
            largest = tl.max(groups, 0)
            low = -float("inf")
            if ((flags & _RANKED) != 0) & (VOCAB > CANDIDATES):
                top_k = tl.load(row_params + _TOP_K)
                top_p = tl.load(row_params + _TOP_P).to(tl.float32, bitcast=True)
                temperature = tl.load(row_params + _TEMPERATURE).to(tl.float32, bitcast=True)
                if (top_k > 0) & (top_k <= _SMALL_TOP_K):
                    low = _kth_group(groups, top_k, GROUPS_PADDED)
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
            tl.store(floats_ptr + line * _NUM_FLOATS + _MAX, largest)
            tl.store(floats_ptr + line * _NUM_FLOATS + _LOW, low)
            tl.store(floats_ptr + line * _NUM_FLOATS + _HIGH, float("inf"))
            tl.store(longs_ptr + line * _NUM_LONGS + _DONE, 0)
            tl.store(longs_ptr + line * _NUM_LONGS + _BORDER, _LOWEST)


@triton.jit
def _search_kernel(
    logits_ptr, edited_ptr, rows_ptr, params_ptr, mask_index_ptr, sums_ptr, totals_ptr, floats_ptr, longs_ptr,
    counters_ptr, logits_stride, params_stride,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr,
    FIRST: tl.constexpr, PIVOTS: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Makes the bracket PIVOTS + 1 times narrower. Sums are float32 here: what they leave open stays inside."""
    _wait(PDL)
    piece, line = tl.program_id(0), tl.program_id(1)
    row_params = params_ptr + tl.load(rows_ptr + line).to(tl.int64) * params_stride
    flags = tl.load(row_params + _FLAGS)
    top_k = tl.load(row_params + _TOP_K)
    top_p = tl.load(row_params + _TOP_P).to(tl.float32, bitcast=True)
    is_complete = _is_complete(top_k, VOCAB, CANDIDATES)
    largest = tl.load(floats_ptr + line * _NUM_FLOATS + _MAX)
    counts = top_k > 0
    searches = ((flags & _RANKED) != 0) & (is_complete == 0) & ((top_k <= 0) | (top_p >= 1.0))
    if searches & (largest < float("inf")) & (largest > -float("inf")):
        is_edited = ((flags & _EDITS) != 0) | (tl.load(mask_index_ptr + line) >= 0)
        wide_line = line.to(tl.int64)
        token = piece * SLICE + tl.arange(0, SLICE)
        x = _load_logits(
            logits_ptr + wide_line * logits_stride, edited_ptr + wide_line * VOCAB, is_edited, token, VOCAB
        )
        inverse = 1.0 / tl.load(row_params + _TEMPERATURE).to(tl.float32, bitcast=True)
        lowest_z = _lowest_z(row_params, flags, largest, inverse)
        z = x * inverse
        weights = tl.where(counts, 1.0, tl.exp(z - largest * inverse))
        weights = tl.where((x > -float("inf")) & (z >= lowest_z), weights, 0.0)
        low = tl.load(floats_ptr + line * _NUM_FLOATS + _LOW)
        high = tl.load(floats_ptr + line * _NUM_FLOATS + _HIGH)
        step = (tl.minimum(high, largest) - low) * (1.0 / (PIVOTS + 1))
        pivot = tl.arange(0, PIVOTS)
        pivots = low + step * (pivot + 1).to(tl.float32)
        if FIRST:
            exact = _weights(x, largest, inverse, lowest_z, counts)
            tl.store(totals_ptr + wide_line * SLICES + piece, tl.sum(exact, 0))
        # All pivots in one reduction: the exchange between warps is what it costs.
        above = tl.sum(tl.where(x[None, :] >= pivots[:, None], weights[None, :], 0.0), 1)
        tl.store(sums_ptr + (wide_line * SLICES + piece) * PIVOTS + pivot, above)
        if _arrive(counters_ptr, line, SLICES):
            s = tl.arange(0, SLICES_PADDED)
            if FIRST:
                totals = tl.load(
                    totals_ptr + wide_line * SLICES + s, mask=s < SLICES, other=0, cache_modifier=".cg"
                )  # fmt: skip
                total = tl.sum(totals, 0)
                tl.store(longs_ptr + line * _NUM_LONGS + _TOTAL, total)
            else:
                total = tl.load(longs_ptr + line * _NUM_LONGS + _TOTAL)
            limit = tl.where(counts, top_k.to(tl.float32), total.to(tl.float32) * (1.0 / _UNIT) * top_p)
            at = sums_ptr + (wide_line * SLICES + s[None, :]) * PIVOTS + pivot[:, None]
            above = tl.sum(tl.load(at, mask=(s < SLICES)[None, :], other=0.0, cache_modifier=".cg"), 1)
            new_low = tl.max(tl.where(above >= limit * 1.000004, pivots, low), 0)
            new_high = tl.min(tl.where(above < limit * 0.999996, pivots, high), 0)
            tl.store(floats_ptr + line * _NUM_FLOATS + _LOW, new_low)
            tl.store(floats_ptr + line * _NUM_FLOATS + _HIGH, new_high)


@triton.jit
def _border_in(keys, weights, above, limit, low, high):
    """The largest key from which on all weights, `above` included, come to the limit; `low` where none does."""
    # The border is one of the keys. Few logits lie in a bracket, so that they leave half as many bits to search.
    last = tl.max(keys, 0)
    if last > _LOWEST:
        first = tl.min(tl.where(keys > _LOWEST, keys, last), 0)
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
        x = _load_logits(logits_line, edited_line, is_edited, token, VOCAB)
        weights = _weights(x, largest, inverse, lowest_z, counts)
        total += tl.sum(tl.where(_key(x, token, ID_BITS) >= border, weights, 0), 0)
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


@triton.jit
def _collect_kernel(
    logits_ptr, edited_ptr, rows_ptr, params_ptr, mask_index_ptr, totals_ptr, keys_ptr, floats_ptr, counters_ptr,
    logits_stride, params_stride, counters_stride,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr,
    ID_BITS: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The tokens in the bracket, and the weight of all above it. `_settle_kernel` goes on; both in one would leave
    room for few programs on a multiprocessor."""
    _wait(PDL)
    piece, line = tl.program_id(0), tl.program_id(1)
    row_params = params_ptr + tl.load(rows_ptr + line).to(tl.int64) * params_stride
    flags = tl.load(row_params + _FLAGS)
    largest = tl.load(floats_ptr + line * _NUM_FLOATS + _MAX)
    if ((flags & _RANKED) != 0) & (largest < float("inf")) & (largest > -float("inf")):
        is_edited = ((flags & _EDITS) != 0) | (tl.load(mask_index_ptr + line) >= 0)
        wide_line = line.to(tl.int64)
        top_k = tl.load(row_params + _TOP_K)
        top_p = tl.load(row_params + _TOP_P).to(tl.float32, bitcast=True)
        is_complete = _is_complete(top_k, VOCAB, CANDIDATES)
        low = tl.load(floats_ptr + line * _NUM_FLOATS + _LOW)
        high = tl.load(floats_ptr + line * _NUM_FLOATS + _HIGH)
        token = piece * SLICE + tl.arange(0, SLICE)
        x = _load_logits(
            logits_ptr + wide_line * logits_stride, edited_ptr + wide_line * VOCAB, is_edited, token, VOCAB
        )
        # A large top-k with a top-p needs two borders: that is left to the slow way.
        if is_complete | (top_k <= 0) | (top_p >= 1.0):
            wanted = (x >= low) & (x < high) & (x > -float("inf"))
            _append(_key(x, token, ID_BITS), wanted, line, keys_ptr, counters_ptr + counters_stride, CANDIDATES)
        if is_complete == 0:
            inverse = 1.0 / tl.load(row_params + _TEMPERATURE).to(tl.float32, bitcast=True)
            lowest_z = _lowest_z(row_params, flags, largest, inverse)
            above = tl.where(x >= high, _weights(x, largest, inverse, lowest_z, top_k > 0), 0)
            tl.store(totals_ptr + wide_line * SLICES + piece, tl.sum(above, 0))


@triton.jit(do_not_specialize=["out_stride"])
def _settle_kernel(
    logits_ptr, edited_ptr, rows_ptr, params_ptr, mask_index_ptr, positions_ptr, counts_ptr, totals_ptr, keys_ptr,
    floats_ptr, longs_ptr, counters_ptr, out_ptr, logits_stride, params_stride, counts_stride, counters_stride,
    out_stride,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr,
    ID_BITS: tl.constexpr, CANDIDATES: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The exact border, one program for each row; a row whose few candidates are all that it can sample is sampled
    here."""
    _wait(PDL)
    line = tl.program_id(0)
    row = tl.load(rows_ptr + line).to(tl.int64)
    row_params = params_ptr + row * params_stride
    flags = tl.load(row_params + _FLAGS)
    if (flags & _RANKED) != 0:
        is_edited = ((flags & _EDITS) != 0) | (tl.load(mask_index_ptr + line) >= 0)
        wide_line = line.to(tl.int64)
        logits_line, edited_line = logits_ptr + wide_line * logits_stride, edited_ptr + wide_line * VOCAB
        top_k = tl.load(row_params + _TOP_K)
        top_p = tl.load(row_params + _TOP_P).to(tl.float32, bitcast=True)
        is_complete = _is_complete(top_k, VOCAB, CANDIDATES)
        counts = top_k > 0
        largest = tl.load(floats_ptr + line * _NUM_FLOATS + _MAX)
        low = tl.load(floats_ptr + line * _NUM_FLOATS + _LOW)
        high = tl.load(floats_ptr + line * _NUM_FLOATS + _HIGH)
        inverse = 1.0 / tl.load(row_params + _TEMPERATURE).to(tl.float32, bitcast=True)
        lowest_z = _lowest_z(row_params, flags, largest, inverse)
        is_sound = (largest < float("inf")) & (largest > -float("inf"))
        collected_ptr = counters_ptr + counters_stride
        count = _take_count(collected_ptr + line)
        low_key = (_order(low).to(tl.int64) << ID_BITS) - 1
        high_key = (_order(tl.minimum(high, largest)).to(tl.int64) + 1) << ID_BITS
        if is_sound == 0:
            tl.store(out_ptr + line, 0)
            tl.store(out_ptr + out_stride + line, 0)
            tl.store(longs_ptr + line * _NUM_LONGS + _DONE, 1)
        elif is_complete & (count <= _FEW):
            c = tl.arange(0, _FEW)
            keys = tl.load(keys_ptr + wide_line * CANDIDATES + c, mask=c < count, other=_LOWEST, cache_modifier=".cg")
            keys = tl.sort(keys, descending=True)
            logit = _key_logit(keys, ID_BITS)
            kept = (c < count) & ((top_k == 0) | (c < top_k))
            logit = tl.where(kept, logit, -float("inf"))
            weights = _weights(logit, largest, inverse, lowest_z, False)
            if top_p < 1.0:
                limit = _limit(tl.sum(weights, 0), top_p)
                kept = kept & (tl.cumsum(weights, 0) - weights < limit)
            kept = kept & (logit * inverse >= lowest_z)
            chosen_token = _key_token(keys, ID_BITS)
            key0, key1 = _noise_keys(row_params, tl.load(positions_ptr + line))
            score = logit * inverse + _gumbel(chosen_token, key0, key1, COMPILED)
            score = tl.where(kept, score, -float("inf"))
            best = tl.max(score, 0)
            winner = tl.min(tl.where(score == best, chosen_token, VOCAB), 0)
            winner = tl.where(winner < VOCAB, winner, 0)
            sound = (best < float("inf")) & (best > -float("inf"))
            _write(out_ptr, out_stride, line, winner, sound, counts_ptr + row * counts_stride, flags)
            tl.store(longs_ptr + line * _NUM_LONGS + _DONE, 1)
        elif (count <= CANDIDATES) & (is_complete | (top_k <= 0) | (top_p >= 1.0)):
            c = tl.arange(0, CANDIDATES)
            keys = tl.load(keys_ptr + wide_line * CANDIDATES + c, mask=c < count, other=_LOWEST, cache_modifier=".cg")
            logit = tl.where(c < count, _key_logit(keys, ID_BITS), -float("inf"))
            border = low_key
            if counts:
                weights = _weights(logit, largest, inverse, lowest_z, True)
                above = tl.full((), 0, tl.int64)
                if is_complete == 0:
                    s = tl.arange(0, SLICES_PADDED)
                    parts = tl.load(totals_ptr + wide_line * SLICES + s, mask=s < SLICES, other=0, cache_modifier=".cg")
                    above = tl.sum(parts, 0)
                border = _border_in(keys, weights, above, top_k.to(tl.int64), low_key, high_key)
            if top_p < 1.0:
                weights = _weights(logit, largest, inverse, lowest_z, False)
                weights = tl.where(keys >= border, weights, 0)
                above = tl.full((), 0, tl.int64)
                total = tl.sum(weights, 0)
                if is_complete == 0:
                    s = tl.arange(0, SLICES_PADDED)
                    parts = tl.load(totals_ptr + wide_line * SLICES + s, mask=s < SLICES, other=0, cache_modifier=".cg")
                    above = tl.sum(parts, 0)
                    total = tl.load(longs_ptr + line * _NUM_LONGS + _TOTAL)
                border = _border_in(keys, weights, above, _limit(total, top_p), border, high_key)
            tl.store(longs_ptr + line * _NUM_LONGS + _BORDER, border)
        else:
            border = (_order(tl.full((), -float("inf"), tl.float32)).to(tl.int64)) << ID_BITS
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
            tl.store(longs_ptr + line * _NUM_LONGS + _BORDER, border)


# ---- the token


@triton.jit(do_not_specialize=["out_stride"])
def _sample_kernel(
    logits_ptr, edited_ptr, rows_ptr, positions_ptr, params_ptr, mask_index_ptr, counts_ptr, values_ptr, tokens_ptr,
    floats_ptr, longs_ptr, counters_ptr, out_ptr, logits_stride, params_stride, out_stride,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr,
    ID_BITS: tl.constexpr, THIS_IS_EXTENDED: tl.constexpr, PDL: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Temperature, noise and argmax: of the rows that temperature alone decides, or of all others."""
    _wait(PDL)
    piece, line = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + line).to(tl.int64)
    row_params = params_ptr + row * params_stride
    flags = tl.load(row_params + _FLAGS)
    is_extended = (flags & _EXTENDED) != 0
    is_edited = False
    if THIS_IS_EXTENDED:
        is_edited = ((flags & _EDITS) != 0) | (tl.load(mask_index_ptr + line) >= 0)
        is_mine = is_extended | is_edited
        if (flags & _RANKED) != 0:
            is_mine = is_mine & (tl.load(longs_ptr + line * _NUM_LONGS + _DONE) == 0)
    else:
        is_mine = is_extended == 0
        if is_extended & (piece == 0):
            tl.store(out_ptr + line, 0)
            tl.store(out_ptr + out_stride + line, 1)
    if is_mine:
        temperature = tl.load(row_params + _TEMPERATURE).to(tl.float32, bitcast=True)
        token = piece * SLICE + tl.arange(0, SLICE)
        wide_line = line.to(tl.int64)
        logits_line = logits_ptr + wide_line * logits_stride
        if THIS_IS_EXTENDED:
            x = _load_logits(logits_line, edited_ptr + wide_line * VOCAB, is_edited, token, VOCAB)
        else:
            x = tl.load(logits_line + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32)
        score = x
        if temperature != 0.0:
            key0, key1 = _noise_keys(row_params, tl.load(positions_ptr + line))
            inverse = 1.0 / temperature
            z = x * inverse
            score = z + _gumbel(token, key0, key1, COMPILED)
            if THIS_IS_EXTENDED:  # noqa: SIM102  known when it is compiled
                if (flags & _FILTERS) != 0:
                    largest = tl.load(floats_ptr + line * _NUM_FLOATS + _MAX)
                    border = tl.load(longs_ptr + line * _NUM_LONGS + _BORDER)
                    lowest_z = _lowest_z(row_params, flags, largest, inverse)
                    kept = (z >= lowest_z) & (_key(x, token, ID_BITS) >= border)
                    score = tl.where(kept | (x != x), score, -float("inf"))
        score = tl.where(token < VOCAB, score, -float("inf"))
        unsound = tl.sum((score != score).to(tl.int32), 0) > 0
        best = tl.max(score, 0)
        winner = tl.min(tl.where(score == best, token, VOCAB), 0)
        # A NaN anywhere marks the whole row: +inf wins every comparison and is reported as unsound.
        best = tl.where(unsound, float("inf"), best)
        winner = tl.where(unsound, 0, winner)
        tl.store(values_ptr + line * SLICES + piece, best)
        tl.store(tokens_ptr + line * SLICES + piece, winner)
        if _arrive(counters_ptr, line, SLICES):
            s = tl.arange(0, SLICES_PADDED)
            s_ok = s < SLICES
            values = tl.load(values_ptr + line * SLICES + s, mask=s_ok, other=-float("inf"), cache_modifier=".cg")
            tokens = tl.load(tokens_ptr + line * SLICES + s, mask=s_ok, other=VOCAB, cache_modifier=".cg")
            top = tl.max(values, 0)
            chosen = tl.min(tl.where(values == top, tokens, VOCAB), 0)
            chosen = tl.where(chosen < VOCAB, chosen, 0)
            sound = (top < float("inf")) & (top > -float("inf"))
            if THIS_IS_EXTENDED:
                _write(out_ptr, out_stride, line, chosen, sound, counts_ptr + row * VOCAB, flags)
            else:
                tl.store(out_ptr + line, chosen)
                tl.store(out_ptr + out_stride + line, sound.to(tl.int32))


# ---- log-probabilities


@triton.jit(do_not_specialize=["top"])
def _logprob_stats_kernel(
    logits_ptr, lines_ptr, maxima_ptr, values_ptr, minima_ptr, floats_ptr, counters_ptr, logits_stride, top,
    VOCAB: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr,
):  # fmt: skip
    """The logarithm of the sum of exponentials, and a bound below the `top` largest logits."""
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
    if _arrive(counters_ptr, item, SLICES):
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
            low = _kth_group(groups, top, GROUPS_PADDED)
        tl.store(floats_ptr + item * _NUM_FLOATS + _MAX, log_total)
        tl.store(floats_ptr + item * _NUM_FLOATS + _LOW, low)


@triton.jit(do_not_specialize=["out_stride", "top"])
def _logprob_collect_kernel(
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
    low = tl.load(floats_ptr + item * _NUM_FLOATS + _LOW)
    collected_ptr = counters_ptr + counters_stride
    token = piece * SLICE + tl.arange(0, SLICE)
    x = tl.load(logits_line + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32)
    tl.store(ranks_ptr + wide_item * SLICES + piece, tl.sum((x > chosen_logit).to(tl.int32), 0))
    _append(_key(x, token, ID_BITS), (x >= low) & (token < VOCAB), item, keys_ptr, collected_ptr, CANDIDATES)
    if _arrive(counters_ptr, item, SLICES):
        count = _take_count(collected_ptr + item)
        log_total = tl.load(floats_ptr + item * _NUM_FLOATS + _MAX)
        s = tl.arange(0, SLICES_PADDED)
        ranks = tl.load(ranks_ptr + wide_item * SLICES + s, mask=s < SLICES, other=0, cache_modifier=".cg")
        out_line = out_ptr + wide_item * out_stride
        tl.store(out_line, chosen)
        tl.store(out_line + 1, (chosen_logit - log_total).to(tl.int32, bitcast=True))
        tl.store(out_line + 2, tl.sum(ranks, 0) + 1)
        if count <= _FEW:
            c = tl.arange(0, _FEW)
            keys = tl.load(keys_ptr + wide_item * CANDIDATES + c, mask=c < count, other=_LOWEST, cache_modifier=".cg")
            keys = tl.sort(keys, descending=True)
            tl.store(out_line + 3 + c, _key_token(keys, ID_BITS), mask=c < top)
            value = _key_logit(keys, ID_BITS) - log_total
            tl.store(out_line + 3 + top + c, value.to(tl.int32, bitcast=True), mask=c < top)
        else:  # many equal logits: the row is read again for each place
            before = tl.full((), 1 << 62, tl.int64)
            for place in range(0, top):
                best = tl.full((), _LOWEST, tl.int64)
                for start in range(0, VOCAB, SLICE):
                    token = start + tl.arange(0, SLICE)
                    x = tl.load(logits_line + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32)
                    key = tl.where(token < VOCAB, _key(x, token, ID_BITS), _LOWEST)
                    best = tl.maximum(best, tl.max(tl.where(key < before, key, _LOWEST), 0))
                tl.store(out_line + 3 + place, _key_token(best, ID_BITS))
                value = _key_logit(best, ID_BITS) - log_total
                tl.store(out_line + 3 + top + place, value.to(tl.int32, bitcast=True))
                before = best
