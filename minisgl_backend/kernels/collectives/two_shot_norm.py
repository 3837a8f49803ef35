"""`all_reduce_norm` for more rows: each row is summed by one rank, which sends the sum to all others.

That is the two-shot all-reduce of TensorRT-LLM and vLLM. Of n ranks each sends 2 (n - 1) / n of its partial sums, where
the one-shot all-reduce sends n - 1 times all of them; but it takes two ways over the links in turn. The RMSNorm is
computed by every rank, of the sum that all have: sending it, too, would take as long as the sum.

Arrival is signalled as there, by numbers that replace -0.0. Why no buffer is overwritten before it is read, and why it
cannot deadlock: as there, too. Of the ranks' programs for the same rows, the one that lags behind waits for parts of a
row that the others have sent already, or for the sum of a row that its owner has sent, or is about to send, as it waits
for nothing else before. And whoever writes a buffer of a row in call n + 2
has ended call n + 1, for which it needed something of that row from the rank that reads it, sent after that rank's call
n had ended: the sum, if that rank is the owner, else its part.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.collectives.all_reduce_norm import (
    PLACES,
    SPINS,
    Inboxes,
    constants_of,
    store_norm,
    sum_of_arrived,
)
from minisgl_backend.kernels.collectives.peer_memory import Summed
from minisgl_backend.kernels.launch import cdiv

# Of `reduce_norm`. On four H200s, sending all rows first took 117 us for 2,048 rows of 5,120 instead of 100;
# sending two to four ahead took as long as one.
PACE = (1, 1)


class TwoShotInboxes(Inboxes):
    """`max_rows` is a multiple of `size`. An inbox has the parts of rows that its rank owns, [PLACES, size - 1 sources,
    max_rows / size, hidden], then the sums of others, [PLACES, max_rows, hidden], at first all empty."""

    @staticmethod
    def num_bytes(size: int, max_rows: int, hidden: int, dtype: torch.dtype) -> int:
        return PLACES * ((size - 1) * (max_rows // size) + max_rows) * hidden * dtype.itemsize


def reduce_norm(
    partial: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    inboxes: TwoShotInboxes,
    *,
    pdl: bool = False,
    parts: Collection[str] = ("send", "sum", "receive"),
    pace: tuple[int, int] = PACE,
) -> Summed:
    """As `all_reduce_norm.reduce_norm`, in three parts.

    pace: of its rows a program sends the first number ahead of the one that it sums, and goes through the second number
    before it waits for the first sum of another rank.
    """
    rows, out = len(partial), torch.empty_like(partial)
    size, (ahead, lag) = inboxes.size, pace
    _two_shot_kernel[(min(rows, inboxes.num_programs),)](
        partial, residual, weight, out, inboxes.addresses, inboxes.turns, inboxes.stop, rows, eps, ahead, lag,
        LINES=inboxes.max_rows // size, TURN=cdiv(inboxes.num_programs, size) * size, SENDS="send" in parts,
        SUMS="sum" in parts, RECEIVES="receive" in parts, **constants_of(partial, inboxes, pdl),
    )  # fmt: skip
    return residual, out


@triton.jit
def _owner(row, SIZE: tl.constexpr, TURN: tl.constexpr):
    """A program's rows are about TURN apart: it has rows of all owners. Of SIZE rows from a multiple of SIZE on, every
    rank owns one."""
    return (row + row // TURN) % SIZE


@triton.jit(do_not_specialize=["rows", "stop", "ahead", "lag"])
def _two_shot_kernel(
    partial_ptr, residual_ptr, weight_ptr, out_ptr, addresses_ptr, turns_ptr, stop, rows, eps, ahead, lag,
    RANK: tl.constexpr, SIZE: tl.constexpr, LINES: tl.constexpr, HIDDEN: tl.constexpr, PADDED: tl.constexpr,
    TURN: tl.constexpr, WORD: tl.constexpr, EMPTY: tl.constexpr, SENDS: tl.constexpr, SUMS: tl.constexpr,
    RECEIVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    first = tl.program_id(0)
    step = tl.num_programs(0)
    i = tl.arange(0, PADDED)
    ok = i < HIDDEN
    wide = tl.full([], 0, tl.int64)  # rows times numbers may need more than 32 bits
    PARTS: tl.constexpr = 2 * (SIZE - 1) * LINES  # lines before the sums of an inbox; two places
    stop_ptr = stop.to(tl.int64).to(tl.pointer_type(tl.int32))
    inbox = tl.load(addresses_ptr + RANK).to(tl.pointer_type(WORD))
    count = (rows - first + step - 1) // step  # of this program's rows
    if SENDS:
        for k in tl.range(0, tl.minimum(ahead, count)):
            _send(
                partial_ptr, addresses_ptr, turns_ptr, wide + first + k * step, i, ok,
                RANK, SIZE, LINES, HIDDEN, TURN, WORD, EMPTY,
            )  # fmt: skip
    for k in tl.range(0, count + lag):
        if SENDS & (k + ahead < count):
            _send(
                partial_ptr, addresses_ptr, turns_ptr, wide + first + (k + ahead) * step, i, ok,
                RANK, SIZE, LINES, HIDDEN, TURN, WORD, EMPTY,
            )  # fmt: skip
        row = wide + first + k * step
        if SUMS & (k < count) & (_owner(row, SIZE, TURN) == RANK):
            place = tl.load(turns_ptr + row)
            own = tl.load(partial_ptr + row * HIDDEN + i, mask=ok, other=0.0)
            residual = tl.load(residual_ptr + row * HIDDEN + i, mask=ok, other=0.0)
            weight = tl.load(weight_ptr + i, mask=ok, other=0.0)
            total = sum_of_arrived(
                inbox, place, row // SIZE, own, i, ok, stop_ptr, RANK, SIZE, LINES, HIDDEN, PADDED, WORD, EMPTY
            )
            hidden = (total + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
            words = hidden.to(WORD, bitcast=True)
            words = tl.where(words == EMPTY, 0, words).to(WORD)
            line = PARTS + place * SIZE * LINES + row
            for away in tl.static_range(1, SIZE):
                theirs = tl.load(addresses_ptr + (RANK + away) % SIZE).to(tl.pointer_type(WORD))
                tl.store(tl.multiple_of(theirs + line * HIDDEN, 16) + i, words, mask=ok)
            hidden = words.to(out_ptr.dtype.element_ty, bitcast=True)
            tl.store(residual_ptr + row * HIDDEN + i, hidden, mask=ok)
            store_norm(out_ptr + row * HIDDEN + i, hidden, weight, eps, ok, HIDDEN)
            tl.store(turns_ptr + row, 1 - place)
        row -= lag * step
        if RECEIVES & (k >= lag) & (_owner(row, SIZE, TURN) != RANK):
            place = tl.load(turns_ptr + row)
            weight = tl.load(weight_ptr + i, mask=ok, other=0.0)
            sent = tl.multiple_of(inbox + (PARTS + place * SIZE * LINES + row) * HIDDEN, 16) + i
            words = tl.load(sent, mask=ok, other=0, volatile=True)
            stopped = 0
            spins = 0
            while (tl.max((words == EMPTY).to(tl.int32), 0) > 0) & (stopped == 0):
                words = tl.load(sent, mask=ok, other=0, volatile=True)
                spins += 1
                if spins % SPINS == 0:
                    stopped = tl.load(stop_ptr, volatile=True)
            tl.store(sent, tl.full([PADDED], EMPTY, WORD), mask=ok)
            hidden = words.to(out_ptr.dtype.element_ty, bitcast=True)
            tl.store(residual_ptr + row * HIDDEN + i, hidden, mask=ok)
            store_norm(out_ptr + row * HIDDEN + i, hidden, weight, eps, ok, HIDDEN)
            tl.store(turns_ptr + row, 1 - place)


@triton.jit
def _send(
    partial_ptr, addresses_ptr, turns_ptr, row, i, ok,
    RANK: tl.constexpr, SIZE: tl.constexpr, LINES: tl.constexpr, HIDDEN: tl.constexpr, TURN: tl.constexpr,
    WORD: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """This rank's part of a row (in 64 bits) to the rank that owns it, where that is another one."""
    owner = _owner(row, SIZE, TURN)
    if owner != RANK:
        place = tl.load(turns_ptr + row)
        words = tl.load(partial_ptr + row * HIDDEN + i, mask=ok, other=0.0).to(WORD, bitcast=True)
        words = tl.where(words == EMPTY, 0, words).to(WORD)
        line = (place * (SIZE - 1) + (RANK - owner + SIZE) % SIZE - 1) * LINES + row // SIZE
        theirs = tl.load(addresses_ptr + owner).to(tl.pointer_type(WORD))
        tl.store(tl.multiple_of(theirs + line * HIDDEN, 16) + i, words, mask=ok)
