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

from typing import Any, NamedTuple

import torch
import triton.language as tl

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.launch import cdiv, next_power_of_2, pdl_options
from minisgl_backend.kernels.sampling import layout
from minisgl_backend.kernels.sampling.common import NUM_FLOATS, NUM_LONGS
from minisgl_backend.kernels.sampling.draw import sample_kernel
from minisgl_backend.kernels.sampling.edits import edit_kernel, rules_kernel
from minisgl_backend.kernels.sampling.filters import collect_kernel, search_kernel, settle_kernel, stats_kernel
from minisgl_backend.kernels.sampling.inputs import RowTables, SampledRows
from minisgl_backend.kernels.sampling.logprobs import logprob_collect_kernel, logprob_stats_kernel

_GROUPS = 512  # at least, where the vocabulary is that large
_REGISTERS = 64  # of a thread that reads slices, so that a multiprocessor has room for four programs
_MOST_TOP = tl.constexpr(32)  # alternatives of log-probabilities, at most


class SamplingTuning(NamedTuple):
    """How the kernels split their work; measured (benchmarks/kernels)."""

    slice: int = 2048  # of the vocabulary
    candidates: int = layout.CANDIDATES
    pivots: int = 8
    rounds: int = 3  # at most: rows whose bracket is narrow leave the others at once
    programs: int = 1600  # of a kernel: more rows mean more slices for each, so that its start and its end cost less
    num_warps: int = 4


class SamplingKernels:
    """The kernels, and the buffers through which the programs of a row share results. Counters return to zero after
    every launch."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        tuning: SamplingTuning = SamplingTuning(),
        pdl: bool | None = None,
    ) -> None:
        """pdl: programmatic dependent launch; None: where the device has it."""
        self.vocab_size, self.tuning = vocab_size, tuning
        self._pdl = DeviceFacts.of(device).dependent_launch if pdl is None else pdl
        slice, candidates = tuning.slice, tuning.candidates
        self._slices = slices = cdiv(vocab_size, slice)
        groups = min(slice // 2, next_power_of_2(cdiv(_GROUPS, slices)))  # of a slice

        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(max_rows, *shape, dtype=dtype, device=device)

        self._values = empty(torch.float32, slices)
        self._tokens = empty(torch.int32, slices)
        self._maxima = empty(torch.float32, slices * groups)
        self._minima = empty(torch.float32, slices)
        self._sums = empty(torch.float32, slices * tuning.pivots)
        self._totals = empty(torch.int64, slices, 2)  # weight above the bracket, and of all
        self._keys = empty(torch.int64, candidates)
        self._floats = empty(torch.float32, int(NUM_FLOATS.value))
        self._longs = empty(torch.int64, int(NUM_LONGS.value))
        self.counters = torch.zeros(2, max_rows, dtype=torch.int32, device=device)  # arrivals, collected candidates
        self._no_masks = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        # Constants that the kernels are compiled for.
        self._sizes = {
            "VOCAB": vocab_size, "SLICE": slice, "SLICES": slices, "SLICES_PADDED": next_power_of_2(slices)
        }  # fmt: skip
        self._groups = {"GROUPS": groups, "GROUPS_PADDED": next_power_of_2(slices * groups)}
        self._ids = {"ID_BITS": max(1, (vocab_size - 1).bit_length())}
        self._candidates = {"CANDIDATES": candidates}

    def sample_plain(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, params: torch.Tensor
    ) -> torch.Tensor:
        """argmax(logits / temperature + noise), or argmax(logits) where the temperature is 0.

        logits [n, vocab_size], rows and positions int32 [n], params int32 [max_rows, NUM_PARAMS]. Returns int32 [2, n]:
        tokens, then 1 where the best value is finite and 0 elsewhere. Of equal values the lowest token id wins. Rows
        that need more than temperature get token 0: `sample_extended` overwrites it.
        """
        n = logits.shape[0]
        out = torch.empty((2, n), dtype=torch.int32, device=logits.device)
        sample_kernel[(self._slices, n)](
            logits, logits, rows, positions, params, self._no_masks, logits, self._values, self._tokens, self._floats,
            self._longs, self.counters, out, logits.stride(0), params.stride(0), n, **self._sizes, **self._ids,
            THIS_IS_EXTENDED=False, COMPILED=logits.is_cuda, **self._launch(),
        )  # fmt: skip
        return out

    def sample_extended(self, logits: torch.Tensor, inputs: SampledRows, tables: RowTables, out: torch.Tensor) -> None:
        """Samples the rows that need more than temperature; the others keep what `out`, int32 [2, n or more], has.
        logits [n, vocab_size]."""
        n, counts = logits.shape[0], tables.counts
        programs = cdiv(self._slices, cdiv(self._slices * n, self.tuning.programs))  # share a row's slices evenly
        grid = (programs, n)
        mask_index = self._no_masks if inputs.mask_index is None else inputs.mask_index
        strides = (logits.stride(0), tables.params.stride(0))
        launch, ids, compiled = self._launch(), self._ids, {"COMPILED": logits.is_cuda}
        edited = self._edited(logits, inputs, tables, mask_index) if inputs.flags & layout.EDITS else self._maxima
        common = (logits, edited, inputs.rows, tables.params, mask_index)
        if inputs.flags & layout.FILTERS:
            stats_kernel[grid](
                *common, self._maxima, self._minima, self._floats, self._longs, self.counters, *strides, **self._sizes,
                **self._groups, **self._candidates, **launch,
            )  # fmt: skip
        if inputs.flags & layout.RANKED:
            wide = {**launch, "num_warps": 2 * self.tuning.num_warps}
            reading = {**wide, "maxnreg": _REGISTERS}
            for search_round in range(self.tuning.rounds if inputs.searches else 0):
                search_kernel[grid](
                    *common, self._sums, self._values, self._floats, self._longs, self.counters, *strides,
                    **self._sizes, FIRST=search_round == 0, PIVOTS=self.tuning.pivots, **self._candidates,
                    THREADS=min(self.tuning.slice, 32 * wide["num_warps"]), **reading,
                )  # fmt: skip
            collect_kernel[grid](
                *common, inputs.positions, self._totals, self._values, self._tokens, self._keys, self._floats,
                self.counters, *strides, self.counters.stride(0), **self._sizes, CHUNK=self.tuning.slice // 2, **ids,
                **self._candidates, **compiled, **reading,
            )  # fmt: skip
            settle_kernel[(n,)](
                *common, inputs.positions, counts, self._totals, self._values, self._tokens, self._keys, self._floats,
                self._longs, self.counters, out, *strides, counts.stride(0), self.counters.stride(0), out.stride(0),
                programs, **self._sizes, **ids, **self._candidates, **compiled, **wide,
            )  # fmt: skip
        sample_kernel[grid](
            logits, edited, inputs.rows, inputs.positions, tables.params, mask_index, counts, self._values,
            self._tokens, self._floats, self._longs, self.counters, out, *strides, out.stride(0), **self._sizes, **ids,
            THIS_IS_EXTENDED=True, **compiled, **launch,
        )  # fmt: skip

    def pack_logprobs(
        self, logits: torch.Tensor, logits_rows: torch.Tensor, token_ids: torch.Tensor, top: int
    ) -> torch.Tensor:
        """For some rows of `logits`: the log-probability and rank of one token, and the `top` most likely tokens.

        logits [n, vocab_size]; logits_rows int32 [k], which rows; token_ids int32 [n], one for each row of logits.
        Returns int32 [k, 3 + 2 * top], see sampling.logprobs.pack. Equal logits: the lower token id first.
        """
        if top > _MOST_TOP.value:
            raise ValueError(f"top is {top}; allowed: at most {_MOST_TOP.value}")
        k, top, num_warps = logits_rows.shape[0], min(top, self.vocab_size), self.tuning.num_warps
        out = torch.empty(k, 3 + 2 * top, dtype=torch.int32, device=logits.device)
        step = self._floats.shape[0]
        for start in range(0, k, step):
            part, out_part = logits_rows[start : start + step], out[start : start + step]
            grid = (self._slices, part.shape[0])
            logprob_stats_kernel[grid](
                logits, part, self._maxima, self._values, self._minima, self._floats, self.counters, logits.stride(0),
                top, **self._sizes, **self._groups, num_warps=num_warps,
            )  # fmt: skip
            logprob_collect_kernel[grid](
                logits, part, token_ids, self._tokens, self._keys, self._floats, self.counters, out_part,
                logits.stride(0), self.counters.stride(0), out.stride(0), top, **self._sizes, **self._ids,
                **self._candidates, num_warps=num_warps,
            )  # fmt: skip
        return out

    def _launch(self) -> dict[str, Any]:
        return {"num_warps": self.tuning.num_warps, **pdl_options(self._pdl)}

    def _edited(
        self, logits: torch.Tensor, inputs: SampledRows, tables: RowTables, mask_index: torch.Tensor
    ) -> torch.Tensor:
        """Logits float32 [n, vocab_size] after penalties, rules and masks."""
        n, rows, params, counts, launch = logits.shape[0], inputs.rows, tables.params, tables.counts, self._launch()
        mask_bits = self._no_masks if inputs.mask_bits is None else inputs.mask_bits
        strides, sizes = (logits.stride(0), params.stride(0)), {"VOCAB": self.vocab_size, "SLICE": self.tuning.slice}
        edited = torch.empty(n, self.vocab_size, dtype=torch.float32, device=logits.device)
        edit_kernel[(self._slices, n)](
            logits, edited, rows, params, counts, mask_index, mask_bits, *strides, counts.stride(0), **sizes, **launch
        )  # fmt: skip
        if inputs.flags & layout.RULES:
            rules_kernel[(n,)](
                logits, edited, rows, inputs.positions, params, tables.tokens, tables.rule_counts, tables.rules,
                tables.prefixes, mask_index, mask_bits, *strides, tables.tokens.stride(0), tables.rules.stride(1),
                tables.prefixes.stride(0), **sizes, **launch,
            )  # fmt: skip
        return edited
