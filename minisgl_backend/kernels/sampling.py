"""Temperature and greedy sampling in one pass over the logits, in the Triton language.

The noise is that of `runner.gumbel`, bit for bit in its hash: a token depends on seed, position and logits only. Each
program finds the best token of one slice of the vocabulary; the program of a row that arrives last picks the row's
winner, so that no second kernel and no copy of the logits is needed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

_SLICE = 2048


class SamplingWorkspace:
    """Best value and token of each slice, and arrival counters, which return to zero after every launch."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, slice: int = _SLICE) -> None:
        self.slice = slice  # tokens of one program
        slices = triton.cdiv(vocab_size, slice)
        self.values = torch.empty(max_rows, slices, dtype=torch.float32, device=device)
        self.tokens = torch.empty(max_rows, slices, dtype=torch.int32, device=device)
        self.counters = torch.zeros(max_rows, dtype=torch.int32, device=device)


def sample_plain(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: torch.Tensor,
    columns: tuple[int, int, int],
    workspace: SamplingWorkspace,
    pdl: bool = False,
    num_warps: int = 4,
) -> torch.Tensor:
    """argmax(logits / temperature + noise), or argmax(logits) where the temperature is 0.

    logits [n, vocab_size], rows and positions int32 [n], params int32 [max_rows, num_columns] with the bits of
    (temperature, seed low, seed high) in `columns`. Returns int32 [2, n]: tokens, then 1 where the best value is
    finite and 0 elsewhere. Of equal values the lowest token id wins.
    """
    n, vocab_size = logits.shape
    out = torch.empty((2, n), dtype=torch.int32, device=logits.device)
    slices = triton.cdiv(vocab_size, workspace.slice)
    extra = {"launch_pdl": True} if pdl else {}
    _sample_kernel[(slices, n)](
        logits, rows, positions, params, workspace.values, workspace.tokens, workspace.counters, out,
        logits.stride(0), params.stride(0), n,
        VOCAB=vocab_size, SLICES=slices, SLICES_PADDED=triton.next_power_of_2(slices), SLICE=workspace.slice,
        TEMPERATURE=columns[0], SEED_LOW=columns[1], SEED_HIGH=columns[2], PDL=pdl,
        COMPILED=logits.is_cuda, num_warps=num_warps, **extra,
    )  # fmt: skip
    return out


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


@triton.jit(do_not_specialize=["n"])
def _sample_kernel(
    logits_ptr, rows_ptr, positions_ptr, params_ptr, values_ptr, tokens_ptr, counters_ptr, out_ptr,
    logits_stride, params_stride, n,
    VOCAB: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr, SLICE: tl.constexpr,
    TEMPERATURE: tl.constexpr, SEED_LOW: tl.constexpr, SEED_HIGH: tl.constexpr, PDL: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    piece = tl.program_id(0)
    line = tl.program_id(1)
    row_params = params_ptr + tl.load(rows_ptr + line).to(tl.int64) * params_stride
    temperature = tl.load(row_params + TEMPERATURE).to(tl.float32, bitcast=True)
    token = piece * SLICE + tl.arange(0, SLICE)
    ok = token < VOCAB
    score = tl.load(logits_ptr + line.to(tl.int64) * logits_stride + token, mask=ok, other=-float("inf"))
    score = score.to(tl.float32)
    if temperature != 0.0:
        # runner.noise explains the hash.
        low = tl.load(row_params + SEED_LOW).to(tl.uint32, bitcast=True)
        high = tl.load(row_params + SEED_HIGH).to(tl.uint32, bitcast=True)
        position = tl.load(positions_ptr + line).to(tl.uint32, bitcast=True)
        golden = tl.full([1], 0x9E3779B9, tl.uint32)
        key0 = _mix(_mix(low ^ _mix(position * golden + 1)) ^ high)
        key1 = _mix(key0 + golden)
        h = (token.to(tl.uint32) * golden) ^ key0
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
        score = score * (1.0 / temperature) - _log2(exponential, COMPILED) * 0.6931471805599453
    score = tl.where(ok, score, -float("inf"))
    unsound = tl.sum((score != score).to(tl.int32), 0) > 0
    best = tl.max(score, 0)
    winner = tl.min(tl.where(score == best, token, VOCAB), 0)
    # A NaN anywhere marks the whole row: +inf wins every comparison and is reported as unsound.
    best = tl.where(unsound, float("inf"), best)
    winner = tl.where(unsound, 0, winner)
    tl.store(values_ptr + line * SLICES + piece, best)
    tl.store(tokens_ptr + line * SLICES + piece, winner)
    tl.debug_barrier()
    arrived = tl.atomic_add(counters_ptr + line, 1, sem="acq_rel")
    if arrived == SLICES - 1:
        tl.store(counters_ptr + line, 0)
        s = tl.arange(0, SLICES_PADDED)
        s_ok = s < SLICES
        values = tl.load(values_ptr + line * SLICES + s, mask=s_ok, other=-float("inf"), cache_modifier=".cg")
        tokens = tl.load(tokens_ptr + line * SLICES + s, mask=s_ok, other=VOCAB, cache_modifier=".cg")
        top = tl.max(values, 0)
        chosen = tl.min(tl.where(values == top, tokens, VOCAB), 0)
        sound = (top < float("inf")) & (top > -float("inf"))
        tl.store(out_ptr + line, tl.where(chosen < VOCAB, chosen, 0))
        tl.store(out_ptr + n + line, sound.to(tl.int32))
