"""All-reduce through memory that the ranks' GPUs share: which sizes it serves, and a rank's state for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from minisgl_backend.kernels.collectives import all_reduce_norm as peer_reduce
from minisgl_backend.kernels.collectives import two_shot_norm
from minisgl_backend.kernels.collectives.choose import most_rows, most_two_shot_rows
from minisgl_backend.kernels.collectives.peer_memory import (
    PeerCollective,
    PeerMemory,
    Peers,
    Summed,
    ends_in_time,
    open_together,
    stop_word,
)
from minisgl_backend.kernels.device_facts import DeviceFacts

PDL_ROWS = 64  # as in triton_ops: with more rows, a kernel that starts early takes room from the one still running


class PeerSums(PeerCollective):
    """Sums that the next norm makes."""

    def __init__(
        self,
        peers: Peers,
        hidden: int,
        rows: tuple[int, int],
        offset: int,
        memory: PeerMemory,
        opened: Mapping[int, int],
    ) -> None:
        """rows: of the largest sum in one shot and in two; offset: of the second kind's inboxes in each rank's memory,
        in bytes; opened: addresses of the others' memory."""
        stop = stop_word()
        super().__init__(memory, stop)
        facts, device = DeviceFacts.of(peers.device), peers.device
        addresses = [opened.get(one, memory.address) for one in range(peers.size)]

        def places(rows: int, offset: int) -> dict[str, Any]:
            return {
                "rank": peers.rank,
                "size": peers.size,
                "max_rows": rows,
                "hidden": hidden,
                "addresses": torch.tensor([one + offset for one in addresses], dtype=torch.int64, device=device),
                "turns": torch.zeros(rows, dtype=torch.int32, device=device),
                "stop": stop.data_ptr(),
                "num_programs": peer_reduce.programs_each(peers.size, hidden) * facts.multiprocessors,
            }

        self._inboxes = peer_reduce.Inboxes(**places(rows[0], 0))
        self._two_shot = two_shot_norm.TwoShotInboxes(**places(rows[1], offset))
        self._pdl = facts.dependent_launch

    @classmethod
    def open(
        cls,
        peers: Peers,
        hidden: int,
        dtype: torch.dtype,
        max_rows: int | None = None,
        two_shot_rows: int | None = None,
    ) -> PeerSums:
        """Raises OSError, on all ranks alike, where the GPUs cannot reach each other's memory.

        `max_rows`: of the largest sum in one shot, `two_shot_rows`: in two shots, a multiple of the number of ranks;
        None for the default.
        """
        size = peers.size
        max_rows = most_rows(size, hidden, dtype) if max_rows is None else max_rows
        two_shot_rows = most_two_shot_rows(size, hidden, dtype) if two_shot_rows is None else two_shot_rows
        rows = (max_rows, two_shot_rows)
        first_bytes = peer_reduce.Inboxes.num_bytes(size, max_rows, hidden, dtype)
        num_bytes = first_bytes + two_shot_norm.TwoShotInboxes.num_bytes(size, two_shot_rows, hidden, dtype)
        return open_together(
            peers,
            peers.others,
            allocate=lambda: PeerMemory(num_bytes, peer_reduce.empty_word(dtype), dtype.itemsize, peers.device),
            use=lambda memory, opened: cls(peers, hidden, rows, first_bytes, memory, opened),
            trial=lambda sums: sums._trial(dtype, peers.device),
            problem="" if max_rows else f"hidden size {hidden} with {size} ranks was not measured",
        )

    def fits(self, rows: int) -> bool:
        return rows <= max(self._inboxes.max_rows, self._two_shot.max_rows)

    def reduce_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, shots: int | None = None
    ) -> Summed:
        """As `peer_reduce.reduce_norm`. shots: 1, where every rank sends all of it to every other; or 2, where each row
        is summed by one rank, which sends the sum to the others; None: as is measured to be faster."""
        pdl = self._pdl and len(partial) <= PDL_ROWS
        if shots == 1 or (shots is None and len(partial) <= self._inboxes.max_rows):
            return peer_reduce.reduce_norm(partial, residual, weight, eps, self._inboxes, pdl=pdl)
        return two_shot_norm.reduce_norm(partial, residual, weight, eps, self._two_shot, pdl=pdl)

    def _trial(self, dtype: torch.dtype, device: torch.device) -> str:
        """Tries two sums of each kind per buffer of a row; returns what is wrong, or ""."""
        hidden, size = self._inboxes.hidden, self._inboxes.size
        weight = torch.ones(hidden, dtype=dtype, device=device)
        residual = torch.zeros(1, hidden, dtype=dtype, device=device)
        partial = torch.full_like(residual, 1.0 + self._inboxes.rank)
        kinds = [1, 2] if self._two_shot.max_rows else [1]
        for shots in kinds * (2 * peer_reduce.PLACES):
            self.reduce_norm(partial, residual, weight, 0.0, shots)
        if not ends_in_time(self.stop):
            return "no data arrived from another rank"
        expected = len(kinds) * 2 * peer_reduce.PLACES * size * (size + 1) // 2
        return "" if bool((residual == expected).all()) else "received wrong numbers from a rank"
