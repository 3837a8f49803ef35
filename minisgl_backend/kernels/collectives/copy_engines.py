"""All-reduce by copy engines, overlapped with GEMMs of the other micro-batch.

For a long prompt the all-reduce of one micro-batch overlaps the other's GEMMs (`TensorParallel.micro_batches`). NCCL
sums with a kernel, which holds multiprocessors that the GEMM needs. The GEMM has one program for each multiprocessor,
with equal shares of the tiles: programs that cannot start at once begin when the sum has ended, and the GEMM takes
longer by as much as the sum took. A copy to another GPU's memory needs no multiprocessor; torch's asynchronous tensor
parallelism also moves its parts like this. The addition that is left is fused into the next norm. Every rank sends its
whole partial sum to every other, which for two ranks is what a ring sends.

Partial sums are added in float32 in the order of the ranks, so that every rank has the same bits; the residual is added
before the sum is rounded.

After each copy, on the same stream, the sum's number is written into the other GPU's memory; the adding kernel waits
for it before it reads the data. Numbers wrap around at 32 bits: only their difference matters.

Why no buffer is overwritten before it is read: there are PLACES buffers, used in rotation, and no rank begins a sum
while PLACES / 2 others have begun on its stream and not ended. So a rank that sends sum n has ended sum n - PLACES / 2,
for which it needed the others' partial sums; they sent these after the end of their sum n - PLACES, whose buffer sum n
is written to.

Why it cannot deadlock: copies and counts need no multiprocessor, and wait for nothing but the GEMMs before them. A
rank that never sends is found by the host, which sets `stop`, as in all_reduce_norm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.collectives.choose import MOST_COPY_BYTES
from minisgl_backend.kernels.collectives.peer_memory import (
    PeerCollective,
    PeerMemory,
    Peers,
    Summed,
    ends_in_time,
    open_together,
    stop_word,
    tensor_at,
)
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.launch import next_power_of_2

PLACES = 4  # buffers; at most half as many sums are in flight
SPINS = tl.constexpr(1024)  # between two reads of `stop`
_PROGRAMS_EACH = 4  # programs per multiprocessor, at most
_COUNT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Sent:
    """A rank's partial sum, being copied to the others."""

    number: int  # of the sum; this rank's first is 1
    left: torch.cuda.Event  # all of the source has been read


class Received(NamedTuple):
    """What the other ranks have sent of a sum, or will send."""

    rank: int  # this one
    parts: torch.Tensor  # [size - 1, at least the sum's rows, hidden], from the ranks after this one
    number: int  # of the sum, signed 32 bits
    counts: int  # address of int32 [size - 1]: the number of the last sum received from each of them
    stop: int  # address of an int32 that ends the waiting for `number` once it is not 0


def add_norm(
    partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, received: Received, programs: int
) -> Summed:
    """Ends an all-reduce: returns (residual + sum of the ranks' partial sums, its RMSNorm * weight).

    partial and residual [rows, hidden], contiguous, of one dtype; the first result is written over `residual`.
    programs: the most that are launched.
    """
    parts = received.parts
    rows, hidden = partial.shape
    out = torch.empty_like(partial)
    padded = next_power_of_2(hidden)
    _add_norm_kernel[(min(rows, programs),)](
        partial, parts, residual, weight, out, received.counts, received.stop, received.number, rows, parts.stride(0),
        eps, RANK=received.rank, SIZE=parts.shape[0] + 1, HIDDEN=hidden, PADDED=padded,
        num_warps=8 if padded >= 4096 else 4,
    )  # fmt: skip
    return residual, out


@triton.jit(do_not_specialize=["counts", "stop", "number", "rows"])
def _add_norm_kernel(
    partial_ptr, received_ptr, residual_ptr, weight_ptr, out_ptr, counts, stop, number, rows, source_stride, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, HIDDEN: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    counts_ptr = counts.to(tl.int64).to(tl.pointer_type(tl.int32))
    stop_ptr = stop.to(tl.int64).to(tl.pointer_type(tl.int32))
    for source in tl.static_range(SIZE - 1):
        count = tl.load(counts_ptr + source, volatile=True)
        stopped = 0
        spins = 0
        while (count - number < 0) & (stopped == 0):
            count = tl.load(counts_ptr + source, volatile=True)
            spins += 1
            if spins % SPINS == 0:
                stopped = tl.load(stop_ptr, volatile=True)
        # From here on, all data written before the count is visible.
        tl.atomic_add(counts_ptr + source, 0, sem="acquire", scope="sys")
    i = tl.arange(0, PADDED)
    ok = i < HIDDEN
    weight = tl.load(weight_ptr + i, mask=ok, other=0.0)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        start = (tl.full([], 0, tl.int64) + row) * HIDDEN  # rows times numbers may need more than 32 bits
        residual = tl.load(residual_ptr + start + i, mask=ok, other=0.0)
        total = tl.zeros([PADDED], tl.float32)
        for source in tl.static_range(SIZE):
            if source == RANK:
                part = tl.load(partial_ptr + start + i, mask=ok, other=0.0)
            else:
                line = ((source - RANK + SIZE) % SIZE - 1) * source_stride + start
                part = tl.load(received_ptr + line + i, mask=ok, other=0.0)
            total += part.to(tl.float32)
        hidden = (total + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(residual_ptr + start + i, hidden, mask=ok)
        x = hidden.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / HIDDEN + eps)
        tl.store(out_ptr + start + i, (x * scale * weight.to(tl.float32)).to(out_ptr.dtype.element_ty), mask=ok)


class PeerCopies(PeerCollective):
    """Sums of long prompts. No call can be captured in a CUDA graph, since the host chooses the buffer of a sum."""

    def __init__(
        self,
        peers: Peers,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        memory: PeerMemory,
        opened: Mapping[int, int],
    ) -> None:
        """shape: of each rank's memory, [PLACES, size - 1, max_rows, hidden], written by the ranks after it; its counts
        follow. opened: addresses of the others' memory."""
        super().__init__(memory, stop_word())
        self._rank, self._size = peers.rank, peers.size
        self._inbox = tensor_at(memory.address, shape, dtype, peers.device)
        inbox_bytes = self._inbox.numel() * dtype.itemsize
        self._counts = memory.address + inbox_bytes  # address of this rank's
        # Of each other rank: its buffer for this rank's data, [PLACES, max_rows, hidden], and the address of its count.
        self._others: list[tuple[torch.Tensor, int]] = []
        for other, address in opened.items():
            source = (peers.rank - other) % peers.size - 1  # this rank, counted from the one after the other
            places = tensor_at(address, shape, dtype, peers.device)[:, source]
            self._others.append((places, address + inbox_bytes + _COUNT_BYTES * source))
        self._num_programs = _PROGRAMS_EACH * DeviceFacts.of(peers.device).multiprocessors
        self._stream = torch.cuda.Stream(peers.device)
        self._number = 0  # of the last sum that has begun

    @classmethod
    def open(cls, peers: Peers, max_rows: int, hidden: int, dtype: torch.dtype) -> PeerCopies:
        """For sums of up to max_rows rows and MOST_COPY_BYTES.

        Raises OSError, on all ranks alike, where the GPUs cannot reach each other's memory.
        """
        shape = (PLACES, peers.size - 1, min(max_rows, MOST_COPY_BYTES // (hidden * dtype.itemsize)), hidden)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize + _COUNT_BYTES * (peers.size - 1)
        return open_together(
            peers,
            peers.others,
            allocate=lambda: PeerMemory(num_bytes, 0, _COUNT_BYTES, peers.device),
            use=lambda memory, opened: cls(peers, shape, dtype, memory, opened),
            trial=lambda copies: copies._trial(),
        )

    def fits(self, rows: int) -> bool:
        return rows <= self._inbox.shape[2]

    def send(self, partial: torch.Tensor) -> Sent:
        """Begins a sum of `partial`, [rows, hidden], contiguous, after the work queued on the current stream."""
        self._number += 1
        place, rows = self._number % PLACES, len(partial)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for places, count in self._others:
                places[place, :rows].copy_(partial)
                self._memory.write_word(count, _signed(self._number), self._stream)
            left = torch.cuda.Event()
            left.record()
        return Sent(self._number, left)

    def add_norm(
        self, sent: Sent, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> Summed:
        """Ends the oldest sum in flight, see the module's `add_norm`."""
        torch.cuda.current_stream().wait_event(sent.left)  # `partial` may be overwritten only after this
        parts, number = self._inbox[sent.number % PLACES], _signed(sent.number)
        received = Received(self._rank, parts, number, self._counts, self._stop.data_ptr())
        return add_norm(partial, residual, weight, eps, received, self._num_programs)

    def _trial(self) -> str:
        """Tries two sums per buffer, two in flight at a time; returns what is wrong, or ""."""
        hidden, device, dtype = self._inbox.shape[3], self._inbox.device, self._inbox.dtype
        weight = torch.ones(hidden, dtype=dtype, device=device)
        residuals = [torch.zeros(1, hidden, dtype=dtype, device=device) for _ in range(PLACES // 2)]
        partial = torch.full_like(weight, 1.0 + self._rank).unsqueeze(0)
        for _ in range(4):
            sent = [self.send(partial) for _ in residuals]
            for one, residual in zip(sent, residuals, strict=True):
                self.add_norm(one, partial, residual, weight, 0.0)
        if not ends_in_time(self.stop):
            return "no data arrived from another rank"
        expected = 4 * self._size * (self._size + 1) // 2
        return "" if all(bool((one == expected).all()) for one in residuals) else "received wrong numbers from a rank"


def _signed(number: int) -> int:
    """The low 32 bits as a signed integer."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
