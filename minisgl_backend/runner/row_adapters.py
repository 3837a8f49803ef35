"""Which rows have adapters, on the host and on one rank's device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from minisgl_backend.arrays import Int32Array
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.step import StepPlan


class RowAdapters:
    """Slots by row; 0: none. Plans come in order, and a step may be tried several times. Rows that change are uploaded
    alone: while no request has an adapter, steps are as without any."""

    def __init__(self, max_rows: int, device: torch.device, *, captured: bool) -> None:
        """captured: decode steps whose rows have some have graphs."""
        self.captured = captured
        self._slots = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._host = np.zeros(max_rows, dtype=np.int32)
        self._uploaded = np.zeros(max_rows, dtype=np.int32)

    def admit(self, plan: StepPlan) -> None:
        """Before anything else is asked of a plan."""
        for admitted in plan.admitted:
            self._host[admitted.row] = admitted.adapter

    def has(self, row: int) -> bool:
        return bool(self._host[row])

    def are_in(self, plan: StepPlan) -> bool:
        """Whether a row of the plan has one."""
        return bool(self._host[plan.decode_rows].any()) or any(self.has(chunk.row) for chunk in plan.prefill)

    def arrays(self, plan: StepPlan) -> dict[str, Int32Array]:
        """What `apply` needs of a plan, by name; nothing where no row changes."""
        rows = np.array([one.row for one in plan.admitted], dtype=np.int32)
        rows = rows[self._host[rows] != self._uploaded[rows]]
        return {"adapter_rows": rows, "adapter_slots": self._host[rows]} if len(rows) else {}

    def apply(self, plan: StepPlan, arrays: Mapping[str, torch.Tensor]) -> None:
        """Brings the device's table up to date with the plan's rows, in stream order; never waits."""
        if "adapter_rows" in arrays:
            self._slots.index_copy_(0, arrays["adapter_rows"].long(), arrays["adapter_slots"])
            rows = [one.row for one in plan.admitted]
            self._uploaded[rows] = self._host[rows]

    def slots_of(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: int32 [num_rows] -> int32 [num_rows]."""
        return self._slots[rows]

    def given(self, tokens: ModelInput, rows: torch.Tensor) -> ModelInput:
        """Tokens of these rows, int32 [num_tokens], with their slots."""
        return tokens._replace(by_row=self._slots[rows])
