"""Sampling in the Triton language: no copy of the logits is sorted and no step launches more than a few kernels.

The vocabulary is cut into slices. Kernels run on a grid of (programs of a row, rows): a program reads one slice where
rows are few, and several where they are many. What the programs of a row find is put together by the one that arrives
last. Rows that do not need a kernel leave it at once. In order, by modules:

    edits    edit     penalties and grammar masks, into a float32 copy of the logits
             rules    what is added to single tokens: logit bias, bad words, min_tokens
    filters  stats    the largest logit, and the largest of each of some 512 groups. The k-th largest of these is at
                      most the k-th largest logit, and only few logits are above it
             search   top-p and large top-k: how much probability is above each of 8 pivots; up to three rounds bring
                      the border into a narrow bracket
             collect  the tokens in that bracket; the best score and the weight of those above it, which are all kept
             settle   the exact border among the tokens collected, found in the registers of one program for each row,
                      and the row's token: the best of those kept
    draw     sample   temperature, Gumbel noise and argmax, for all other rows: those without top-k and top-p, and the
                      few whose border `settle` found by reading the row again

Rows with a temperature and no other option only need the last kernel, which then has a program for each slice. Apart
from the stages: log-probabilities of the raw logits (logprobs), what several stages need (common), and here the
functions that launch them.

Probabilities are summed as integers (exp(z - max) in units of 2**-40), so that a border does not depend on the order of
summation. Tokens are ranked by logit and then by token id, the lower one first. What is kept is therefore exactly what
`minisgl_backend.sampling.sampler` keeps, whatever the other rows of a batch are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from minisgl_backend.kernels.launch import cdiv, next_power_of_2, pdl_options
from minisgl_backend.kernels.sampling import layout
from minisgl_backend.kernels.sampling.common import NUM_FLOATS, NUM_LONGS
from minisgl_backend.kernels.sampling.draw import sample_kernel
from minisgl_backend.kernels.sampling.edits import edit_kernel, rules_kernel
from minisgl_backend.kernels.sampling.filters import collect_kernel, search_kernel, settle_kernel, stats_kernel
from minisgl_backend.kernels.sampling.logprobs import logprob_collect_kernel, logprob_stats_kernel

_SLICE = 2048
_GROUPS = 512  # at least, where the vocabulary is that large
_PIVOTS = 8
_ROUNDS = 3  # at most: rows whose bracket is narrow leave the others at once
_PROGRAMS = 1600  # of a kernel: more rows mean more slices for each, so that its start and its end cost less
_REGISTERS = 64  # of a thread that reads slices, so that a multiprocessor has room for four programs
_MOST_TOP = tl.constexpr(32)  # alternatives of log-probabilities, at most


class SamplingWorkspace:
    """Buffers through which the programs of a row share results. Counters return to zero after every launch."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        slice: int = _SLICE,
        candidates: int = layout.CANDIDATES,
        pivots: int = _PIVOTS,
        rounds: int = _ROUNDS,
        programs: int = _PROGRAMS,
    ) -> None:
        self.vocab_size, self.slice, self.device = vocab_size, slice, device
        self.candidates, self.pivots, self.rounds, self.programs = candidates, pivots, rounds, programs
        self.slices = slices = cdiv(vocab_size, slice)
        self.groups = min(slice // 2, next_power_of_2(cdiv(_GROUPS, slices)))  # of a slice
        self.id_bits = max(1, (vocab_size - 1).bit_length())

        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(max_rows, *shape, dtype=dtype, device=device)

        self.values = empty(torch.float32, slices)
        self.tokens = empty(torch.int32, slices)
        self.maxima = empty(torch.float32, slices * self.groups)
        self.minima = empty(torch.float32, slices)
        self.sums = empty(torch.float32, slices * pivots)
        self.totals = empty(torch.int64, slices, 2)  # weight above the bracket, and of all
        self.keys = empty(torch.int64, candidates)
        self.floats = empty(torch.float32, int(NUM_FLOATS.value))
        self.longs = empty(torch.int64, int(NUM_LONGS.value))
        self.counters = torch.zeros(2, max_rows, dtype=torch.int32, device=device)  # arrivals, collected candidates
        self.no_masks = torch.full((max_rows,), -1, dtype=torch.int32, device=device)

    def programs_of_a_row(self, n: int) -> int:
        """Programs of each row where n rows are sampled together; they share the slices evenly."""
        return cdiv(self.slices, cdiv(self.slices * n, self.programs))

    def sizes(self) -> dict[str, int]:
        """Constants that the kernels are compiled for."""
        return {
            "VOCAB": self.vocab_size,
            "SLICE": self.slice,
            "SLICES": self.slices,
            "SLICES_PADDED": next_power_of_2(self.slices),
        }


@dataclass(frozen=True)
class EditInputs:
    """Inputs of penalties, rules and grammar masks; all on the device."""

    tokens: torch.Tensor  # int32 [max_rows, max_seq_len + 1]  of every row, by position
    counts: torch.Tensor  # int16 [max_rows, vocab_size]  see layout.IN_PROMPT
    rule_counts: torch.Tensor  # int32 [max_rows, 2]  rules without a prefix, and all rules
    rules: torch.Tensor  # int32 [max_rows, NUM_RULE_COLUMNS, max_rules]  those without a prefix first
    prefixes: torch.Tensor  # int32 [max_rows, max_prefix_tokens]
    mask_index: torch.Tensor | None = None  # int32 [n]  row of mask_bits, or -1
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
    sample_kernel[(w.slices, n)](
        logits, logits, rows, positions, params, w.no_masks, logits, w.values, w.tokens, w.floats, w.longs, w.counters,
        out, logits.stride(0), params.stride(0), n, **w.sizes(), ID_BITS=w.id_bits, THIS_IS_EXTENDED=False,
        COMPILED=logits.is_cuda, num_warps=num_warps, **pdl_options(pdl),
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
    `searches`: some ranked row is not `layout.is_complete`. `out` int32 [2, n or more].
    """
    n, w = logits.shape[0], workspace
    whole_grid, sizes = (w.slices, n), w.sizes()
    programs = w.programs_of_a_row(n)
    grid = (programs, n)
    mask_index = w.no_masks if edits.mask_index is None else edits.mask_index
    mask_bits = w.no_masks if edits.mask_bits is None else edits.mask_bits
    strides = (logits.stride(0), params.stride(0))
    launch = {"num_warps": num_warps, **pdl_options(pdl)}
    edited = w.maxima  # a float32 pointer, so that kernels are compiled once; nothing reads it then
    if flags & layout.EDITS:
        edited = torch.empty(n, w.vocab_size, dtype=torch.float32, device=logits.device)
        edit_kernel[whole_grid](
            logits, edited, rows, params, edits.counts, mask_index, mask_bits, *strides, edits.counts.stride(0),
            VOCAB=w.vocab_size, SLICE=w.slice, **launch,
        )  # fmt: skip
    if flags & layout.RULES:
        rules_kernel[(n,)](
            logits, edited, rows, positions, params, edits.tokens, edits.rule_counts, edits.rules, edits.prefixes,
            mask_index, mask_bits, *strides, edits.tokens.stride(0), edits.rules.stride(1), edits.prefixes.stride(0),
            VOCAB=w.vocab_size, SLICE=w.slice, **launch,
        )  # fmt: skip
    common = (logits, edited, rows, params, mask_index)
    if flags & layout.FILTERS:
        stats_kernel[grid](
            *common, w.maxima, w.minima, w.floats, w.longs, w.counters, *strides, **sizes, GROUPS=w.groups,
            GROUPS_PADDED=next_power_of_2(w.slices * w.groups), CANDIDATES=w.candidates, **launch,
        )  # fmt: skip
    if flags & layout.RANKED:
        wide = {**launch, "num_warps": 2 * num_warps}
        reading = {**wide, "maxnreg": _REGISTERS}
        if searches:
            for search_round in range(w.rounds):
                search_kernel[grid](
                    *common, w.sums, w.values, w.floats, w.longs, w.counters, *strides, **sizes,
                    FIRST=search_round == 0, PIVOTS=w.pivots, CANDIDATES=w.candidates,
                    THREADS=min(w.slice, 32 * wide["num_warps"]), **reading,
                )  # fmt: skip
        collect_kernel[grid](
            *common, positions, w.totals, w.values, w.tokens, w.keys, w.floats, w.counters, *strides,
            w.counters.stride(0), **sizes, CHUNK=w.slice // 2, ID_BITS=w.id_bits, CANDIDATES=w.candidates,
            COMPILED=logits.is_cuda, **reading,
        )  # fmt: skip
        settle_kernel[(n,)](
            *common, positions, edits.counts, w.totals, w.values, w.tokens, w.keys, w.floats, w.longs, w.counters, out,
            *strides, edits.counts.stride(0), w.counters.stride(0), out.stride(0), programs, **sizes, ID_BITS=w.id_bits,
            CANDIDATES=w.candidates, COMPILED=logits.is_cuda, **wide,
        )  # fmt: skip
    sample_kernel[grid](
        logits, edited, rows, positions, params, mask_index, edits.counts, w.values, w.tokens, w.floats, w.longs,
        w.counters, out, *strides, out.stride(0), **sizes, ID_BITS=w.id_bits, THIS_IS_EXTENDED=True,
        COMPILED=logits.is_cuda, **launch,
    )  # fmt: skip


def pack_logprobs(
    logits: torch.Tensor,
    logits_rows: torch.Tensor,
    token_ids: torch.Tensor,
    top: int,
    workspace: SamplingWorkspace,
    num_warps: int = 4,
) -> torch.Tensor:
    """For some rows of `logits`: the log-probability and rank of one token, and the `top` most likely tokens.

    logits [n, vocab_size]; logits_rows int32 [k], which rows; token_ids int32 [n], one for each row of logits. Returns
    int32 [k, 3 + 2 * top], see sampling.logprobs.pack. Equal logits: the lower token id first.
    """
    w, k = workspace, logits_rows.shape[0]
    if top > _MOST_TOP.value:
        raise ValueError(f"top is {top}; allowed: at most {_MOST_TOP.value}")
    top = min(top, w.vocab_size)
    out = torch.empty(k, 3 + 2 * top, dtype=torch.int32, device=logits.device)
    step = w.floats.shape[0]
    for start in range(0, k, step):
        part, out_part = logits_rows[start : start + step], out[start : start + step]
        grid = (w.slices, part.shape[0])
        logprob_stats_kernel[grid](
            logits, part, w.maxima, w.values, w.minima, w.floats, w.counters, logits.stride(0), top, **w.sizes(),
            GROUPS=w.groups, GROUPS_PADDED=next_power_of_2(w.slices * w.groups), num_warps=num_warps,
        )  # fmt: skip
        logprob_collect_kernel[grid](
            logits, part, token_ids, w.tokens, w.keys, w.floats, w.counters, out_part, logits.stride(0),
            w.counters.stride(0), out.stride(0), top, **w.sizes(), ID_BITS=w.id_bits, CANDIDATES=w.candidates,
            num_warps=num_warps,
        )  # fmt: skip
    return out
