"""Logits to rank 0 and its tokens back, through memory that the ranks' GPUs share, in the Triton language.

Only rank 0 samples, so only rank 0 needs whole logits. It owns a buffer for those of a decode step, and the GEMMs of
all ranks write their columns there: over NVLink while they compute the next columns, where an all-gather would begin
after the GEMM and send everything to every rank. After its GEMM each rank flips its flag in rank 0's memory, and a
kernel of rank 0 waits for all flags. Tokens go to an inbox of every other rank, where the data itself signals its
arrival: an empty entry holds a number that is no token id.

A kernel that signals (a flag, a receipt) first flips a word in its own GPU's memory by an atomic with acquire-release
semantics in system scope: a GPU that sees the signal then sees all that was written before it. No atomic is on another
GPU's memory, since not every link supports them. Flags are one bit and not a counter, which would overflow. One bit is
enough, since no rank is ever more than one step ahead:

Logits. A rank writes those of step n + 1 after the all-reduces of that step's forward pass, for which it needs rank 0's
partial sums. Rank 0 sends these after everything on its stream for step n: the kernel that waits for flags, sampling
(captured or not) and log-probabilities. So only decode steps, captured or not, and their warm-ups may use this: each is
a forward pass with all-reduces, its logits are computed once, and rank 0 has launched all that reads them before it
launches another step (`EngineCore.step`). Prompt log-probabilities compute logits several times with no all-reduce in
between, and use the all-gather, as do all other steps.

Tokens. Before it sends, rank 0 waits for every rank's receipt of the previous tokens, which in a run of steps arrived
long ago. A rank writes the receipt once it has read the tokens and emptied the inbox. So tokens can be sent in any
order of steps, and twice in one.

No rank waits for a call that another rank makes later: flags, tokens and receipts belong to calls that all ranks make
in the same order. A rank that never signals is found by the host, which sets `stop`, as in all_reduce_norm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.collectives.peer_memory import (
    PeerCollective,
    PeerMemory,
    Peers,
    ends_in_time,
    open_together,
    stop_word,
    tensor_at,
)
from minisgl_backend.kernels.launch import next_power_of_2

SPINS = tl.constexpr(1024)  # between two reads of `stop`
EMPTY = -(1 << 31)  # no token id
_EMPTY = tl.constexpr(EMPTY)
_LOGITS = tl.constexpr(0)  # indices of `Mailboxes.turns`
_TOKENS = tl.constexpr(1)
_ROW_MULTIPLE = 128  # numbers: 16-bit rows of logits are aligned to 256 bytes, as fast kernels need
_TRIALS = 4  # each value of the flags twice


@dataclass(frozen=True)
class Mailboxes:
    """Flags and inboxes of one rank and addresses of all ranks' ones, in this process's address space."""

    rank: int
    size: int
    max_rows: int
    flags: int  # address of int32 [size] in rank 0's memory, zeros at first: the bit of each rank's last logits
    receipts: int  # of int32 [size] there, zeros at first: the bit of the tokens that each rank has received last
    inboxes: torch.Tensor  # int64 [size], device: addresses of int32 [2 * max_rows], EMPTY at first; rank 0 has none
    turns: torch.Tensor  # int32 [2], device, zeros at first: the bits of this rank's next logits and tokens
    stop: int  # address of an int32 that the host sets to something other than 0 to end all waiting


def tell(boxes: Mailboxes) -> None:
    """Signals rank 0 that what this stream has written so far is there. On another rank."""
    _tell_kernel[(1,)](boxes.turns, boxes.flags, RANK=boxes.rank, num_warps=1)


def wait(boxes: Mailboxes) -> None:
    """Waits until all others have signalled. On rank 0."""
    _wait_kernel[(1,)](boxes.turns, boxes.flags, boxes.stop, SIZE=boxes.size, num_warps=1)


def send(token_ids: torch.Tensor, boxes: Mailboxes) -> None:
    """Sends int32 [2, up to max_rows], contiguous, to all others. On rank 0."""
    _send_kernel[(1,)](
        token_ids, boxes.turns, boxes.inboxes, boxes.receipts, boxes.stop, token_ids.numel(),
        SIZE=boxes.size, PADDED=next_power_of_2(2 * boxes.max_rows), num_warps=1,
    )  # fmt: skip


def receive(token_ids: torch.Tensor, boxes: Mailboxes) -> None:
    """Waits for what rank 0 sends and writes it over token_ids, of the same shape. On another rank."""
    _receive_kernel[(1,)](
        token_ids, boxes.turns, boxes.inboxes, boxes.receipts, boxes.stop, token_ids.numel(),
        RANK=boxes.rank, PADDED=next_power_of_2(2 * boxes.max_rows), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["flags"])
def _tell_kernel(turns_ptr, flags, RANK: tl.constexpr):
    turn = tl.atomic_xor(turns_ptr + _LOGITS, 1, sem="acq_rel", scope="sys")
    tl.store(_words(flags) + RANK, 1 - turn)


@triton.jit(do_not_specialize=["flags", "stop"])
def _wait_kernel(turns_ptr, flags, stop, SIZE: tl.constexpr):
    turn = 1 - tl.load(turns_ptr + _LOGITS)
    for source in tl.static_range(1, SIZE):
        _wait_for(_words(flags) + source, turn, stop)
    tl.debug_barrier()  # all threads have read the turn
    tl.atomic_xor(turns_ptr + _LOGITS, 1, sem="acq_rel", scope="sys")


@triton.jit(do_not_specialize=["receipts", "stop", "count"])
def _send_kernel(
    tokens_ptr, turns_ptr, inboxes_ptr, receipts, stop, count, SIZE: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    turn = tl.load(turns_ptr + _TOKENS)
    i = tl.arange(0, PADDED)
    ok = i < count
    tokens = tl.load(tokens_ptr + i, mask=ok, other=0)
    tokens = tl.where(tokens == _EMPTY, 0, tokens)
    for peer in tl.static_range(1, SIZE):
        _wait_for(_words(receipts) + peer, turn, stop)
    for peer in tl.static_range(1, SIZE):
        inbox = tl.load(inboxes_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.store(inbox + i, tokens, mask=ok)
    tl.debug_barrier()  # all threads have read the turn
    tl.store(turns_ptr + _TOKENS, 1 - turn)


@triton.jit(do_not_specialize=["receipts", "stop", "count"])
def _receive_kernel(
    tokens_ptr, turns_ptr, inboxes_ptr, receipts, stop, count, RANK: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    i = tl.arange(0, PADDED)
    ok = i < count
    inbox = tl.load(inboxes_ptr + RANK).to(tl.pointer_type(tl.int32))
    tokens = tl.load(inbox + i, mask=ok, other=0, volatile=True)
    stopped = 0
    spins = 0
    while (tl.max((tokens == _EMPTY).to(tl.int32), 0) > 0) & (stopped == 0):
        tokens = tl.load(inbox + i, mask=ok, other=0, volatile=True)
        spins += 1
        if spins % SPINS == 0:
            stopped = tl.load(_words(stop), volatile=True)
    tl.debug_barrier()  # no thread empties an entry that another has not read
    tl.store(inbox + i, tl.full([PADDED], _EMPTY, tl.int32), mask=ok)
    # After a stop these tokens must not be used, but later kernels still index tables with them.
    tl.store(tokens_ptr + i, tl.where(tokens == _EMPTY, 0, tokens), mask=ok)
    tl.debug_barrier()  # all entries are empty before one thread sends the receipt
    turn = tl.atomic_xor(turns_ptr + _TOKENS, 1, sem="acq_rel", scope="sys")
    tl.store(_words(receipts) + RANK, 1 - turn)


@triton.jit
def _wait_for(word_ptr, turn, stop):
    word = tl.load(word_ptr, volatile=True)
    stopped = 0
    spins = 0
    while (word != turn) & (stopped == 0):
        word = tl.load(word_ptr, volatile=True)
        spins += 1
        if spins % SPINS == 0:
            stopped = tl.load(_words(stop), volatile=True)


@triton.jit
def _words(address):
    return address.to(tl.int64).to(tl.pointer_type(tl.int32))


class PeerLogits(PeerCollective):
    """Logits and tokens of decode steps; the module's docstring says which steps may use it."""

    def __init__(
        self, logits: torch.Tensor, vocab_size: int, boxes: Mailboxes, memory: PeerMemory, stop: torch.Tensor
    ) -> None:
        super().__init__(memory, stop)
        self._logits = logits  # [max_rows, vocab_size or some more], rank 0's, on all ranks
        self._vocab_size = vocab_size
        self._boxes = boxes

    @classmethod
    def open(cls, peers: Peers, max_rows: int, vocab_size: int, dtype: torch.dtype) -> PeerLogits:
        """For logits [up to max_rows, vocab_size] of `dtype`.

        Raises OSError, on all ranks alike, where the GPUs cannot reach each other's memory or rank 0's GPU has too
        little.
        """
        rank, size, device = peers.rank, peers.size, peers.device
        width = -(-vocab_size // _ROW_MULTIPLE) * _ROW_MULTIPLE
        logit_bytes = max_rows * width * dtype.itemsize
        num_bytes, word = (logit_bytes + 8 * size, 0) if rank == 0 else (8 * max_rows, EMPTY)

        def use(memory: PeerMemory, opened: Mapping[int, int]) -> PeerLogits:
            addresses = {**opened, rank: memory.address}
            stop = stop_word()
            boxes = Mailboxes(
                rank=rank,
                size=size,
                max_rows=max_rows,
                flags=addresses[0] + logit_bytes,
                receipts=addresses[0] + logit_bytes + 4 * size,
                inboxes=torch.tensor([addresses.get(one, 0) for one in range(size)], dtype=torch.int64, device=device),
                turns=torch.zeros(2, dtype=torch.int32, device=device),
                stop=stop.data_ptr(),
            )
            return cls(tensor_at(addresses[0], (max_rows, width), dtype, device), vocab_size, boxes, memory, stop)

        return open_together(
            peers,
            range(1, size) if rank == 0 else [0],
            allocate=lambda: PeerMemory(num_bytes, word, 4, device),
            use=use,
            trial=lambda made: made._trial(),
        )

    def fits(self, rows: int) -> bool:
        return rows <= self._boxes.max_rows

    def columns(self, rows: int, start: int, count: int) -> torch.Tensor:
        """Where a rank writes its logits [rows, count], of the token ids from `start` on; a strided view."""
        return self._logits[:rows, start : start + count]

    def collect(self, rows: int) -> torch.Tensor:
        """After all ranks have written: logits [rows, vocab_size] on rank 0, empty [rows, 0] on others."""
        if self._boxes.rank == 0:
            wait(self._boxes)
            return self._logits[:rows, : self._vocab_size]
        tell(self._boxes)
        return self._logits.new_empty(rows, 0)

    def share_tokens(self, token_ids: torch.Tensor) -> None:
        """Overwrites int32 [2, rows], contiguous, with rank 0's."""
        (send if self._boxes.rank == 0 else receive)(token_ids, self._boxes)

    def _trial(self) -> str:
        """Tries logits and tokens with both values of the flags; returns what is wrong, or ""."""
        rank, size, found = self._boxes.rank, self._boxes.size, []
        for trial in range(_TRIALS):
            # The next ones are written once rank 0's sum of these has arrived.
            self.columns(1, rank, 1).fill_(trial + rank)
            logits = self.collect(1)
            tokens = torch.zeros(2, 1, dtype=torch.int32, device=logits.device)
            if rank == 0:
                tokens += logits[:, :size].sum().to(torch.int32)
            self.share_tokens(tokens)
            found.append(tokens)
        if not ends_in_time(self.stop):
            return "no data arrived from another rank"
        expected = [[[size * trial + size * (size - 1) // 2]] * 2 for trial in range(_TRIALS)]
        return "" if torch.stack(found).tolist() == expected else "received wrong logits from a rank"
