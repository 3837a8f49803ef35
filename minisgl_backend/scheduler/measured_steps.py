"""The one estimate of what steps take, which all shares of a step read, and the steps that it learns from."""

from __future__ import annotations

from collections import deque

from minisgl_backend.arrays import BoolArray
from minisgl_backend.scheduler.step_estimate import StepEstimate, StepLoad
from minisgl_backend.step import StepPlan, StepTimes


class MeasuredSteps:
    """Steps are noted where a share depends on what they take: beside background requests, and with images."""

    def __init__(self, times: StepTimes | None) -> None:
        """`times`: None where nothing is known, and no step is noted."""
        self.estimate = None if times is None else StepEstimate(times)
        self.in_flight: deque[StepLoad] = deque()  # steps that are measured once they are committed
        self._last_end = (-1, 0.0)  # the last step that has ended while any was in flight, and when

    def note_plan(self, plan: StepPlan, is_background: BoolArray) -> None:
        """A step has been planned. `is_background`: by row, bool [max_rows]."""
        if self.estimate is None:
            return
        tokens = [0, 0]
        for chunk in plan.prefill:
            tokens[int(is_background[chunk.row])] += len(chunk.token_ids)
        rows = int(is_background.take(plan.decode_rows).sum())
        is_plain = not (len(plan.draft_tokens) or plan.num_proposed or plan.encode)
        self.in_flight.append(StepLoad(plan.step, len(plan.decode_rows) - rows, tokens[0], rows, tokens[1], is_plain))

    def note_end(self, step: int, now: float) -> None:
        """A step has been committed at `now`, in seconds, while some are in flight here: it has taken the time since
        the step before was, whether it was launched before that or after."""
        before, end = self._last_end
        self._last_end = step, now
        if self.in_flight[0].step != step:
            return
        load = self.in_flight.popleft()
        if before == step - 1 and self.estimate is not None:
            self.estimate.note(load, now - end)
