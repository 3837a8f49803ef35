"""All-reduce through memory that the ranks' GPUs share: which sizes it serves, and a rank's state for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from minisgl_backend.kernels.collectives import all_reduce_norm as peer_reduce
from minisgl_backend.kernels.collectives import two_shot_norm
from minisgl_backend.kernels.collectives.choose import most_rows, most_two_shot_rows
from minisgl_backend.kernels.collectives.peer_memory import Gather, Minimum, PeerMemory, ends_in_time, open_together
from minisgl_backend.kernels.device_facts import DeviceFacts

PDL_ROWS = 64  # as in triton_ops: with more rows, a kernel that starts early takes room from the one still running


class PeerSums:
    """One rank's side of the sums. All ranks construct it at the same time and call it in the same order."""

    def __init__(
        self,
        inboxes: peer_reduce.Inboxes,
        two_shot: two_shot_norm.TwoShotInboxes,
        memory: PeerMemory,
        stop: torch.Tensor,
        pdl: bool,
    ) -> None:
        self._inboxes = inboxes
        self._two_shot = two_shot
        self._memory = memory
        self._stop = stop  # int32 [1] in host memory mapped to the device
        self._pdl = pdl

    @classmethod
    def open(
        cls,
        rank: int,
        size: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        gather: Gather,
        minimum: Minimum,
        max_rows: int | None = None,
        two_shot_rows: int | None = None,
    ) -> PeerSums:
        """Raises OSError, on all ranks alike, where the GPUs cannot reach each other's memory.

        `gather` and `minimum`: collectives of the ranks; `max_rows`: of the largest sum in one shot, `two_shot_rows`:
        in two shots, a multiple of `size`; None for the default.
        """
        max_rows = most_rows(size, hidden, dtype) if max_rows is None else max_rows
        two_shot_rows = most_two_shot_rows(size, hidden, dtype) if two_shot_rows is None else two_shot_rows
        first_bytes = peer_reduce.Inboxes.num_bytes(size, max_rows, hidden, dtype)
        num_bytes = first_bytes + two_shot_norm.TwoShotInboxes.num_bytes(size, two_shot_rows, hidden, dtype)

        def use(memory: PeerMemory, opened: Mapping[int, int]) -> PeerSums:
            stop = torch.zeros(1, dtype=torch.int32).pin_memory()
            facts = DeviceFacts.of(device)
            addresses = [opened.get(one, memory.address) for one in range(size)]

            def places(rows: int, offset: int) -> dict[str, Any]:
                return {
                    "rank": rank,
                    "size": size,
                    "max_rows": rows,
                    "hidden": hidden,
                    "addresses": torch.tensor([one + offset for one in addresses], dtype=torch.int64, device=device),
                    "turns": torch.zeros(rows, dtype=torch.int32, device=device),
                    "stop": stop.data_ptr(),
                    "num_programs": peer_reduce.programs_each(size, hidden) * facts.multiprocessors,
                }

            inboxes = peer_reduce.Inboxes(**places(max_rows, 0))
            two_shot = two_shot_norm.TwoShotInboxes(**places(two_shot_rows, first_bytes))
            return cls(inboxes, two_shot, memory, stop, facts.dependent_launch)

        return open_together(
            rank,
            [other for other in range(size) if other != rank],
            device,
            gather,
            minimum,
            allocate=lambda: PeerMemory(num_bytes, peer_reduce.empty_word(dtype), dtype.itemsize, device),
            use=use,
            trial=lambda sums: sums._trial(dtype, device),
            problem="" if max_rows else f"hidden size {hidden} with {size} ranks was not measured",
        )

    def fits(self, rows: int) -> bool:
        return rows <= max(self._inboxes.max_rows, self._two_shot.max_rows)

    def reduce_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `peer_reduce.reduce_norm`."""
        by = self.in_one_shot if len(partial) <= self._inboxes.max_rows else self.in_two_shots
        return by(partial, residual, weight, eps)

    def in_one_shot(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Every rank sends all of it to every other."""
        pdl = self._pdl and len(partial) <= PDL_ROWS
        return peer_reduce.reduce_norm(partial, residual, weight, eps, self._inboxes, pdl=pdl)

    def in_two_shots(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row is summed by one rank, which sends the sum to the others."""
        pdl = self._pdl and len(partial) <= PDL_ROWS
        return two_shot_norm.reduce_norm(partial, residual, weight, eps, self._two_shot, pdl=pdl)

    def stop(self) -> None:
        """Ends sums that wait for a rank, now and later; their results must not be used. On any thread."""
        self._stop.fill_(1)

    def close(self) -> None:
        """Frees the memory: once this rank computes nothing more, and the others have closed it."""
        self._memory.close()

    def _trial(self, dtype: torch.dtype, device: torch.device) -> str:
        """Tries two sums of each kind per buffer of a row; returns what is wrong, or ""."""
        hidden, size = self._inboxes.hidden, self._inboxes.size
        weight = torch.ones(hidden, dtype=dtype, device=device)
        residual = torch.zeros(1, hidden, dtype=dtype, device=device)
        partial = torch.full_like(residual, 1.0 + self._inboxes.rank)
        kinds = [self.in_one_shot, *([self.in_two_shots] if self._two_shot.max_rows else [])]
        for by in kinds * (2 * peer_reduce.PLACES):
            by(partial, residual, weight, 0.0)
        if not ends_in_time(self.stop):
            return "no data arrived from another rank"
        expected = len(kinds) * 2 * peer_reduce.PLACES * size * (size + 1) // 2
        return "" if bool((residual == expected).all()) else "received wrong numbers from a rank"
