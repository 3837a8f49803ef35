"""Steps of a start, of models with states: before the first request all slots are free for them."""

from __future__ import annotations

import msgspec
import numpy as np

from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.step import StepPlan


def with_states(plan: StepPlan, runner: ModelRunner) -> StepPlan:
    """The plan with a slot for each of its rows: kernels read states in place of zeros, and rows that it does not admit
    are folded up to the page of their token. Of a model without states: as it is."""
    if not runner.num_state_slots:
        return plan
    admitted = {row.row: msgspec.structs.replace(row, state_slot=_slot(row.row, runner)) for row in plan.admitted}
    later = np.array([row not in admitted for row in plan.decode_rows.tolist()], dtype=np.bool_)
    rows, page = plan.decode_rows[later], runner.attention.spec.page_size
    return msgspec.structs.replace(
        plan,
        admitted=tuple(admitted.values()),
        fold_rows=rows,
        fold_sources=np.zeros_like(rows),
        fold_targets=np.array([_slot(row, runner) for row in rows.tolist()], dtype=np.int32),
        fold_borders=(plan.decode_lengths[later] - 1) // page * page,
    )


def _slot(row: int, runner: ModelRunner) -> int:
    return 1 + row % runner.num_state_slots
