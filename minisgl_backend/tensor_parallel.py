"""One model over several devices: this process's rank, and the collectives it shares with the other ranks.

There is no default group: whoever needs a collective holds this object.
"""

from __future__ import annotations

import copy
import enum
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from minisgl_backend.errors import ConfigError, EngineDeadError
from minisgl_backend.kernels.collectives.peer_memory import PeerCollective, Peers

if TYPE_CHECKING:
    from minisgl_backend.kernels.collectives.copy_engines import PeerCopies, Sent
    from minisgl_backend.kernels.collectives.logits_to_rank_0 import PeerLogits
    from minisgl_backend.kernels.collectives.peer_sums import PeerSums

CLOSE_S = 5.0  # what leaving a group may take
# Rows from which on the all-reduce of one micro-batch overlaps GEMMs of the other. Smaller GEMMs waste more: on two
# H200s, with NCCL, prompts of 1,000 to 2,000 rows were 5 to 11% slower as two micro-batches, 8,192 rows 1.2% faster.
OVERLAP_ROWS = 4096
MICRO_BATCH_ROWS = 128  # a micro-batch has a multiple of these: the rows of a GEMM's tile

log = logging.getLogger(__name__)


class AllReduce(enum.Enum):
    """How the ranks' parts of a GEMM's output are summed."""

    FUSED_IN_NORM = enum.auto()  # few rows: by the next norm, through shared memory, which saves two kernels
    COPY_ENGINE = enum.auto()  # many: likewise, but copy engines move the parts, overlapped with GEMMs of other rows
    NCCL = enum.auto()  # in place, by NCCL or gloo


class TensorParallel:
    """All ranks call the same collectives in the same order. Size 1 communicates with no other and costs nothing."""

    def __init__(self, rank: int, size: int, group: Any | None, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._group = group
        self._device = device
        self._leaver = None if group is None else _Leaver(group.abort if device.type == "cuda" else group.shutdown)
        self._waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._peer_sums: PeerSums | None = None
        self._peer_copies: PeerCopies | None = None
        self._peer_logits: PeerLogits | None = None

    @classmethod
    def single(cls) -> TensorParallel:
        """A model on one device."""
        return cls(0, 1, None, torch.device("cpu"))

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        host: str,
        port: int,
        device: torch.device,
        *,
        listener: socket.socket | None = None,
        address: str = "",
        shared: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> TensorParallel:
        """Meets the other ranks at `host:port`, where rank 0 listens. NCCL for a cuda device, gloo for the CPU.

        `listener`: rank 0's socket, where it listens there already; it is taken over. `address`: of this machine, at
        which gloo's other ranks reach this one; "": what its name resolves to, or GLOO_SOCKET_IFNAME. `shared`:
        settings by name, which must be rank 0's.

        Raises ConfigError for settings or arguments that are wrong, EngineDeadError where the other ranks do not come
        in time or are lost meanwhile: the same may succeed later.
        """
        if not 0 <= rank < size:
            raise ConfigError(f"tensor-parallel rank is {rank}; allowed: 0 to {size - 1}")
        if size == 1:
            return cls.single()
        timeout = timedelta(seconds=timeout_s)
        try:
            listen_fd = None if listener is None else listener.detach()
            store = dist.TCPStore(host, port, size, rank == 0, timeout, master_listen_fd=listen_fd)
            _check_shared(store, rank, shared or {})
            if device.type == "cuda":
                torch.cuda.set_device(device)
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                options.is_high_priority_stream = True  # all-reduces that overlap GEMMs are the first to get room
                group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
            else:
                group = _gloo(store, rank, size, timeout, address)
            tp = cls(rank, size, group, device)
            tp.minimum(0)  # opens the connections now and not inside the first step
        except (RuntimeError, ValueError) as error:
            kind = EngineDeadError if isinstance(error, RuntimeError) else ConfigError
            raise kind(f"rank {rank} of {size} could not join the others at {host}:{port}: {error}") from error
        return tp

    def note_waits(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """From now on collectives in which the host waits for other ranks run inside of `waiting()`: those of the CPU.

        A GPU's are only launched here.
        """
        if self._device.type == "cpu":
            self._waiting = waiting

    def begin_all_reduce(self, tensor: torch.Tensor) -> Callable[[], object] | None:
        """Begins to sum over the ranks, in place. What is returned waits for the end (of a GPU, its current stream
        does) and is to be called before anything reads the tensor; None: it is there already."""
        if self._group is None:
            return None
        work = self._group.allreduce([tensor])

        def wait() -> None:
            with self._waiting():
                work.wait()

        return wait

    def micro_batches(self, num_rows: int) -> list[int]:
        """Splits `num_rows` into micro-batches whose all-reduce overlaps the other's GEMMs; one where that does not
        pay."""
        if self.size == 1 or num_rows < OVERLAP_ROWS:
            return [num_rows]
        first = -(-num_rows // (2 * MICRO_BATCH_ROWS)) * MICRO_BATCH_ROWS
        return [first, num_rows - first]

    def longest_micro_batch(self, max_rows: int) -> int:
        """Rows of the longest micro-batch of all passes of up to max_rows."""
        if self.size == 1 or max_rows < OVERLAP_ROWS:
            return max_rows
        return max(OVERLAP_ROWS - 1, self.micro_batches(max_rows)[0])

    def share_memory(self, hidden_size: int, dtype: torch.dtype, max_rows: int) -> None:
        """From now on sums of rows of `hidden_size` go through memory that the ranks' GPUs share, where they can.

        max_rows: of a pass. Takes memory for 4 sums of half as many rows, and for 2 of fewer (less than 4 where they go
        in two shots), each up to the limits of kernels/collectives/choose.py; what is larger is NCCL's. All ranks call
        this at the same time, before anything is captured.
        """
        if self._group is None or self._device.type != "cuda":
            return
        # Imported here: Triton exists only where there is a GPU.
        from minisgl_backend.kernels.collectives.choose import MOST_COPY_RANKS
        from minisgl_backend.kernels.collectives.copy_engines import PeerCopies
        from minisgl_backend.kernels.collectives.peer_sums import PeerSums

        try:
            self._peer_sums = PeerSums.open(self._peers(), hidden_size, dtype)
        except OSError as error:
            log.warning("all sums over the ranks are left to NCCL: %s", error)
            return
        if self.size > MOST_COPY_RANKS or max_rows < OVERLAP_ROWS:
            return
        longest = self.micro_batches(max_rows)[0]
        try:
            self._peer_copies = PeerCopies.open(self._peers(), longest, hidden_size, dtype)
        except OSError as error:
            log.warning("sums of %d rows and more are left to NCCL: %s", OVERLAP_ROWS, error)

    def all_reduce_for(self, num_rows: int, *, captured: bool) -> AllReduce:
        """How a pass of `num_rows` is all-reduced, the same on all ranks. Not by copy engines where it is captured:
        their buffers are chosen on the host."""
        if num_rows < OVERLAP_ROWS:
            fits = self._peer_sums is not None and self._peer_sums.fits(num_rows)
            return AllReduce.FUSED_IN_NORM if fits else AllReduce.NCCL
        fits = self._peer_copies is not None and self._peer_copies.fits(self.micro_batches(num_rows)[0])
        return AllReduce.COPY_ENGINE if fits and not captured else AllReduce.NCCL

    def send_ahead(self, partial: torch.Tensor, all_reduce: AllReduce) -> Sent | None:
        """Begins to send this rank's `partial` [rows, hidden_size], contiguous, to the other ranks, with COPY_ENGINE;
        `sum_norm` takes what is returned. At most two are on their way, and end in the order of their beginning.
        """
        if all_reduce is not AllReduce.COPY_ENGINE:
            return None
        assert self._peer_copies is not None, "share_memory comes first"
        return self._peer_copies.send(partial)

    def sum_norm(
        self,
        partial: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        sent: Sent | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """residual + the sum of the ranks' `partial`, and its RMSNorm: [rows, hidden_size] each, the same bits on every
        rank. The first may be written over `residual`. Not with NCCL; `sent`: of `send_ahead`.
        """
        if sent is not None:
            assert self._peer_copies is not None, "share_memory comes first"
            return self._peer_copies.add_norm(sent, partial, residual, weight, eps)
        assert self._peer_sums is not None, "share_memory comes first"
        return self._peer_sums.reduce_norm(partial, residual, weight, eps)

    def share_logits(self, max_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
        """From now on logits of decode steps of up to max_rows rows, and their tokens, go through memory that the
        ranks' GPUs share, where they can.

        All ranks call this at the same time, before anything is captured. Takes max_rows * vocab_size numbers of rank
        0's memory.
        """
        if self._group is None or self._device.type != "cuda":
            return
        from minisgl_backend.kernels.collectives.logits_to_rank_0 import PeerLogits

        try:
            self._peer_logits = PeerLogits.open(self._peers(), max_rows, vocab_size, dtype)
        except OSError as error:
            log.warning("logits and tokens of decode steps are left to NCCL: %s", error)

    def without_shared_memory(self) -> TensorParallel:
        """The same ranks, with all collectives torch's: for a model of other sizes than `share_memory` was told."""
        other = copy.copy(self)
        other._peer_sums = other._peer_copies = other._peer_logits = None
        return other

    def logits_columns(self, num_rows: int, start: int, count: int) -> torch.Tensor | None:
        """Where rank 0 wants this rank's logits [num_rows, count] of a decode step, of the tokens from `start` on, the
        rows further apart; None: they are to be gathered. The same on all ranks.

        Only for decode steps; `collect_logits` is next. kernels/collectives/logits_to_rank_0.py says why.
        """
        if self._peer_logits is None or not self._peer_logits.fits(num_rows):
            return None
        return self._peer_logits.columns(num_rows, start, count)

    def collect_logits(self, num_rows: int) -> torch.Tensor:
        """What all ranks have written to `logits_columns`: [num_rows, vocab_size] on rank 0, good until the next decode
        step, and [num_rows, 0] on others."""
        assert self._peer_logits is not None, "logits_columns comes first"
        return self._peer_logits.collect(num_rows)

    def share_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`broadcast` of a decode step's tokens, int32 [2, batch], contiguous, from rank 0."""
        if self._peer_logits is None or not self._peer_logits.fits(token_ids.shape[1]):
            return self.broadcast(token_ids)
        self._peer_logits.share_tokens(token_ids)
        return token_ids

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """tensor [count, ...], the same shape on every rank -> [size, count, ...], in rank order, on every rank."""
        if self._group is None:
            return tensor.unsqueeze(0)
        count, *rest = tensor.shape
        gathered = torch.empty((self.size * count, *rest), dtype=tensor.dtype, device=tensor.device)
        with self._waiting():
            self._group._allgather_base(gathered, tensor.contiguous()).wait()
        return gathered.view(self.size, count, *rest)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrites the tensor with that of rank `source`, in place; returns it."""
        if self._group is not None:
            options = dist.BroadcastOptions()
            options.rootRank = source
            with self._waiting():
                self._group.broadcast([tensor], options).wait()
        return tensor

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values, on every rank. Synchronises: for start-up only."""
        if self._group is None:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._group.allreduce([tensor], options).wait()
        return int(tensor.item())

    def close(self) -> None:
        """Leaves the group. Collectives must not be called afterwards.

        NCCL waits for captured graphs that hold collectives: they are to be freed before. Returns after CLOSE_S at the
        latest, whatever the other ranks do.
        """
        self.abandon()
        leaver, self._leaver = self._leaver, None
        if leaver is not None and not leaver.join(CLOSE_S):
            log.warning("rank %d could not leave its group within %g s; it is left behind", self.rank, CLOSE_S)
            return
        shared = self._shared()
        self._peer_sums = self._peer_copies = self._peer_logits = None
        for one in shared:
            try:
                one.close()
            except OSError as error:  # a device that failed
                log.warning("the memory that ranks shared was not freed: %s", error)

    def abandon(self) -> None:
        """Begins to leave the group. On a GPU that ends collectives which wait for a rank that is gone: whoever waits
        for their results goes on, and must not use them."""
        self._group = None
        for shared in self._shared():
            shared.stop()
        if self._leaver is not None:
            self._leaver.go.set()

    def _peers(self) -> Peers:
        return Peers(self.rank, self.size, self._device, self.all_gather, self.minimum)

    def _shared(self) -> list[PeerCollective]:
        return [one for one in (self._peer_sums, self._peer_copies, self._peer_logits) if one is not None]


def _check_shared(store: dist.Store, rank: int, shared: Mapping[str, str]) -> None:
    if rank == 0:
        store.set("shared", json.dumps(dict(shared)))
        return
    of_rank_0 = json.loads(store.get("shared"))
    for name, value in shared.items():
        if value != of_rank_0.get(name):
            raise ConfigError(f"{name} is {value} on rank {rank}; allowed: {of_rank_0.get(name)}, as on rank 0")


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    if not address or os.environ.get("GLOO_SOCKET_IFNAME"):
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


class _Leaver:
    """A thread that leaves a group when it is told to. It waits from the start: none can begin while Python ends."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self.go = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(leave,), name="leave-group", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Waits for its end, and so for that of the group; whether it came. Python must not end in between: a thread
        that is in a destructor then ends the process with SIGABRT."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, leave: Callable[[], None]) -> None:
        self.go.wait()
        try:
            leave()  # an abort also ends collectives that wait for a rank which has died
        except RuntimeError as error:  # the others may have gone first
            log.debug("leaving the group: %s", error)


def device_of_rank(kind: str, index: int) -> torch.device:
    """`kind`: "cpu" or "cuda". `index`: of its GPU, RuntimeConfig.device_index."""
    return torch.device("cuda", index) if kind == "cuda" else torch.device("cpu")
