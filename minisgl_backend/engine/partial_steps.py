"""Results and grammar masks of steps that were executed without some of their rows, or not at all."""

from __future__ import annotations

import msgspec
import numpy as np

from minisgl_backend.arrays import IndexArray, Int32Array
from minisgl_backend.step import StepPlan, StepResult


def rows_of(plan: StepPlan) -> frozenset[int]:
    """All rows that the plan computes."""
    images = (one.row for one in plan.encode)
    return frozenset([*images, *(chunk.row for chunk in plan.prefill), *plan.decode_rows.tolist()])


def failed_result(plan: StepPlan, why: str, *, executed: bool) -> StepResult:
    """The result of a step in which every row failed; `executed`: after part of the plan had reached the device."""
    tokens = np.zeros(len(plan.sampled_rows), dtype=np.int32)
    return StepResult(step=plan.step, token_ids=tokens, failed_rows=rows_of(plan), why=why, executed=executed)


def with_left_out(plan: StepPlan, result: StepResult, left_out: frozenset[int], why: str) -> StepResult:
    """Turns the result of a plan without some of its rows into one of the whole plan."""
    kept = _kept(plan, left_out)
    tokens = np.zeros(len(plan.sampled_rows), dtype=np.int32)
    tokens[kept] = result.token_ids
    return msgspec.structs.replace(
        result,
        token_ids=tokens,
        logprobs={int(kept[index]): logprobs for index, logprobs in result.logprobs.items()},
        failed_rows=result.failed_rows | left_out,
        why=why,
    )


def masks_of(
    plan: StepPlan, masks: tuple[Int32Array, Int32Array] | None, left_out: frozenset[int]
) -> tuple[Int32Array, Int32Array] | None:
    """Turns a plan's masks into those of the plan without some of its rows."""
    if masks is None or not left_out:
        return masks
    indices, bits = masks
    kept = _kept(plan, left_out)
    stays = np.isin(indices, kept)
    return (np.searchsorted(kept, indices[stays]).astype(np.int32), bits[stays]) if stays.any() else None


def _kept(plan: StepPlan, left_out: frozenset[int]) -> IndexArray:
    """Result indices of the remaining rows, ascending."""
    return np.flatnonzero(np.isin(plan.sampled_rows, list(left_out), invert=True))
