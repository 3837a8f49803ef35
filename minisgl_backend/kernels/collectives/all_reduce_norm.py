"""Sum over ranks, residual addition and RMSNorm in one kernel, over memory that the ranks' GPUs share, in the Triton
language.

A decode step of a large model has two all-reduces a layer, each of some kilobytes, so only their latency counts. Here
each rank writes its partial sums straight into the other GPUs' memory and adds up what the others have written into its
own: the one-shot all-reduce of TensorRT-LLM and of vLLM's custom all-reduce. There is no barrier and no flag either.
The data itself signals its arrival: an empty buffer holds the bits of -0.0, and a number that is -0.0 is sent as 0.0.
NCCL's LL protocol does the same with a flag next to each word, TensorRT-LLM's Lamport kernels with the same sentinel.

Partial sums are added in float32 in the order of the ranks, so that every rank has the same bits. The residual is added
before the one rounding, as in a GEMM of one rank.

Why no buffer is overwritten before it is read: every row has two buffers for each source, used alternately. Rank P
writes a buffer again in its call n + 2. It has then ended call n + 1, for which it needed this rank's partial sum, sent
in this rank's call n + 1. That began when this rank's call n had ended, which had read the buffer and marked it empty.
Calls follow one another on one stream; with `pdl` a kernel still sends only after the one before it has ended.

Why it cannot deadlock: no more programs are launched than fit on the device at the same time (`programs_each`, and a
bound on registers that the compiler has to keep to), and each sends all of its rows before it waits for any. With
`ahead` it sends at least the row that it waits for and all rows before it: of the ranks' programs for the same rows,
the one that lags behind waits for rows that the others have sent already. A rank that never sends is found by the host
(see tensor_parallel.py), which sets `stop`: waiting kernels poll it about every millisecond, and go on with results
that must not be used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.collectives.peer_memory import Summed
from minisgl_backend.kernels.launch import next_power_of_2, pdl_options

# Up to this number of rows all are sent before any is received. With more rows it is faster to overlap the two: 48.9
# instead of 59.6 us for 1,408 rows of 5,120 on two H200s.
MOST_SENT_FIRST = 512
PLACES = 2  # of each row and source, see above
SPINS = tl.constexpr(1024)  # between two reads of `stop`
REGISTERS = 65536  # of a multiprocessor, since compute capability 5.0
MOST_REGISTERS = 255  # of a thread
TWO_HOLD = 16384  # ranks * 16-bit numbers that a program holds in half of the registers without spilling
EMPTY_WORDS = {2: -(1 << 15), 4: -(1 << 31)}  # -0.0, by bytes of a number
WORDS = {2: tl.int16, 4: tl.int32}


@dataclass(frozen=True)
class Inboxes:
    """Buffers of one rank and addresses of all ranks' buffers, as the kernel needs them.

    An inbox is [PLACES, size - 1 sources, max_rows, hidden] numbers, at first all `empty_word`. Sources are counted
    from the rank after the inbox's own.
    """

    rank: int
    size: int
    max_rows: int
    hidden: int
    addresses: torch.Tensor  # int64 [size], device: addresses of the ranks' inboxes in this process
    turns: torch.Tensor  # int32 [max_rows], device, zeros at first: which buffer each row's next sum uses
    stop: int  # address of an int32 that the host sets to something other than 0 to end all waiting
    num_programs: int  # programs that are guaranteed to run at the same time; the same on all ranks

    @staticmethod
    def num_bytes(size: int, max_rows: int, hidden: int, dtype: torch.dtype) -> int:
        """Of one inbox."""
        return PLACES * (size - 1) * max_rows * hidden * dtype.itemsize


def programs_each(size: int, hidden: int) -> int:
    """Programs that are guaranteed to run on one multiprocessor at the same time. One always fits; two fit where half
    of the registers is enough for this number of ranks and hidden size (`launch_options`)."""
    return 2 if size * next_power_of_2(hidden) <= TWO_HOLD else 1


@cache
def launch_options(size: int, hidden: int) -> Mapping[str, int]:
    """Launch options. `maxnreg` limits the registers so that `programs_each` programs fit."""
    num_warps = 8 if next_power_of_2(hidden) >= 2048 else 4
    registers = REGISTERS // (programs_each(size, hidden) * 32 * num_warps)
    return {"num_warps": num_warps, **({"maxnreg": registers} if registers < MOST_REGISTERS else {})}


def empty_word(dtype: torch.dtype) -> int:
    """The bits of an empty buffer element, as a signed integer of the dtype's size."""
    return EMPTY_WORDS[dtype.itemsize]


def constants_of(partial: torch.Tensor, inboxes: Inboxes, pdl: bool) -> dict[str, Any]:
    """Constants and launch options that sums in one and in two shots have in common."""
    hidden, item = partial.shape[1], partial.element_size()
    return {
        "RANK": inboxes.rank,
        "SIZE": inboxes.size,
        "HIDDEN": hidden,
        "PADDED": next_power_of_2(hidden),
        "WORD": WORDS[item],
        "EMPTY": EMPTY_WORDS[item],
        **pdl_options(pdl),
        **(launch_options(inboxes.size, hidden) if partial.is_cuda else {}),  # not for Triton's interpreter
    }


def reduce_norm(
    partial: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    inboxes: Inboxes,
    *,
    pdl: bool = False,
    parts: Collection[str] = ("send", "receive"),
    ahead: int | None = None,
) -> Summed:
    """All-reduce, residual addition and RMSNorm: returns (residual + sum of the ranks' `partial`, its norm * weight).

    partial and residual [rows, hidden], contiguous, of one dtype; the first result is written over `residual`. All
    ranks call this with the same shapes in the same order. `parts`: some of its two parts, for tests that run the ranks
    one after the other.

    `ahead`: rows that a program sends before it waits for the first, 0 for all; None: the value that was measured to be
    faster for this number of rows.
    """
    rows, out = len(partial), torch.empty_like(partial)
    if ahead is None:
        ahead = 1 if rows > MOST_SENT_FIRST else 0
    send, receive = "send" in parts, "receive" in parts
    _reduce_norm_kernel[(min(rows, inboxes.num_programs),)](
        partial, residual, weight, out, inboxes.addresses, inboxes.turns, inboxes.stop, rows, eps,
        MAX_ROWS=inboxes.max_rows, SEND=send, RECEIVE=receive, AHEAD=ahead if send and receive else 0,
        **constants_of(partial, inboxes, pdl),
    )  # fmt: skip
    return residual, out


@triton.jit(do_not_specialize=["rows", "stop"])
def _reduce_norm_kernel(
    partial_ptr, residual_ptr, weight_ptr, out_ptr, addresses_ptr, turns_ptr, stop, rows, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, MAX_ROWS: tl.constexpr, HIDDEN: tl.constexpr, PADDED: tl.constexpr,
    WORD: tl.constexpr, EMPTY: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr, PDL: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    first = tl.program_id(0)
    step = tl.num_programs(0)
    i = tl.arange(0, PADDED)
    ok = i < HIDDEN
    wide = tl.full([], 0, tl.int64)  # rows times numbers may need more than 32 bits
    if SEND:
        before = rows
        if AHEAD > 0:
            before = tl.minimum(rows, first + AHEAD * step)
        for row in tl.range(first, before, step):
            _send(partial_ptr, addresses_ptr, turns_ptr, wide + row, i, ok, RANK, SIZE, MAX_ROWS, HIDDEN, WORD, EMPTY)
    if RECEIVE:
        inbox = tl.load(addresses_ptr + RANK).to(tl.pointer_type(WORD))
        stop_ptr = stop.to(tl.int64).to(tl.pointer_type(tl.int32))
        for row in tl.range(first, rows, step):
            if AHEAD > 0:
                later = wide + row + AHEAD * step
                if later < rows:
                    _send(
                        partial_ptr, addresses_ptr, turns_ptr, later, i, ok, RANK, SIZE, MAX_ROWS, HIDDEN, WORD, EMPTY
                    )
            place = tl.load(turns_ptr + row)
            start = (wide + row) * HIDDEN
            # All of these loads are in flight while the program waits, packed in half the registers until needed.
            own = tl.load(partial_ptr + start + i, mask=ok, other=0.0)
            residual = tl.load(residual_ptr + start + i, mask=ok, other=0.0)
            weight = tl.load(weight_ptr + i, mask=ok, other=0.0)
            total = sum_of_arrived(
                inbox, place, wide + row, own, i, ok, stop_ptr, RANK, SIZE, MAX_ROWS, HIDDEN, PADDED, WORD, EMPTY
            )
            hidden = (total + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
            tl.store(residual_ptr + start + i, hidden, mask=ok)
            store_norm(out_ptr + start + i, hidden, weight, eps, ok, HIDDEN)
            tl.store(turns_ptr + row, 1 - place)  # a bit and not a counter, which would overflow


@triton.jit
def sum_of_arrived(
    inbox, place, line, own, i, ok, stop_ptr,
    RANK: tl.constexpr, SIZE: tl.constexpr, LINES: tl.constexpr, HIDDEN: tl.constexpr, PADDED: tl.constexpr,
    WORD: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """Waits for what all other ranks send to `line` (64 bits) of `inbox`, [PLACES, SIZE - 1, LINES, HIDDEN], and marks
    it empty. Returns the sum with `own` in the order of the ranks, float32 [PADDED]."""
    total = tl.zeros([PADDED], tl.float32)
    waits = 1
    stopped = 0
    spins = 0
    while (waits > 0) & (stopped == 0):
        # All are read at once: one after the other, each would take its own time.
        total = tl.zeros([PADDED], tl.float32)
        missing = tl.zeros([PADDED], tl.int32)
        for source in tl.static_range(SIZE):
            if source == RANK:
                total += own.to(tl.float32)
            else:
                away = (source - RANK + SIZE) % SIZE - 1
                sent = tl.multiple_of(inbox + ((place * (SIZE - 1) + away) * LINES + line) * HIDDEN, 16) + i
                words = tl.load(sent, mask=ok, other=0, volatile=True)
                missing |= (words == EMPTY).to(tl.int32)
                total += words.to(own.dtype, bitcast=True).to(tl.float32)
        waits = tl.max(missing, 0)
        spins += 1
        if spins % SPINS == 0:
            stopped = tl.load(stop_ptr, volatile=True)
    for away in tl.static_range(SIZE - 1):
        sent = tl.multiple_of(inbox + ((place * (SIZE - 1) + away) * LINES + line) * HIDDEN, 16) + i
        tl.store(sent, tl.full([PADDED], EMPTY, WORD), mask=ok)
    return total


@triton.jit
def store_norm(out, hidden, weight, eps, ok, HIDDEN: tl.constexpr):
    """The RMSNorm of `hidden`, times weight."""
    x = hidden.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    tl.store(out, (x * scale * weight.to(tl.float32)).to(hidden.dtype), mask=ok)


@triton.jit
def _send(
    partial_ptr, addresses_ptr, turns_ptr, row, i, ok,
    RANK: tl.constexpr, SIZE: tl.constexpr, MAX_ROWS: tl.constexpr, HIDDEN: tl.constexpr,
    WORD: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """`row` in 64 bits."""
    place = tl.load(turns_ptr + row)
    words = tl.load(partial_ptr + row * HIDDEN + i, mask=ok, other=0.0).to(WORD, bitcast=True)
    words = tl.where(words == EMPTY, 0, words).to(WORD)
    for away in tl.static_range(1, SIZE):
        # This rank is the one SIZE - away after that peer.
        line = (place * (SIZE - 1) + SIZE - away - 1) * MAX_ROWS + row
        inbox = tl.load(addresses_ptr + (RANK + away) % SIZE).to(tl.pointer_type(WORD))
        tl.store(tl.multiple_of(inbox + line * HIDDEN, 16) + i, words, mask=ok)
