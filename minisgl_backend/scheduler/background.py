"""What requests below the default priority, as those of batches, have of a step while others run.

A step takes the longer the more rows decode in it and the more prompt tokens it has, and how much longer depends on the
machine: where weights have to be read anyway a few more cost little, and on a CPU a row costs several times what a
prompt token does. So the share is a time: background requests may lengthen a step to `slowdown` times what it takes
without them, by what steps take meanwhile (`StepEstimate`): one step of LEFT_OUT has none of them, to see what it takes
then. Steps with prompts of others have none either: first tokens come first.
"""

from __future__ import annotations

import sys

from minisgl_backend.scheduler.step_estimate import StepEstimate

UNLIMITED = sys.maxsize
PASSED_OVER = 8  # steps with prompts of others, after which one has background tokens all the same
# One step in that many leaves background requests out: until the estimate has REMEMBERED of them, and from then on.
LEFT_OUT_FIRST, LEFT_OUT = 4, 32


class BackgroundShare:
    """Of each step beside other requests."""

    def __init__(self, slowdown: float, estimate: StepEstimate | None) -> None:
        """`slowdown`: how many times as long a step may take, 1 or more. `estimate`: of `MeasuredSteps`; None where
        nothing is known, and the share has no bound."""
        self._slowdown = slowdown
        self._estimate = estimate
        self._passed_over = 0  # steps, one after the other
        self._since_left_out = LEFT_OUT_FIRST  # steps

    def of_step(self, rows: int, prompts: int, background: int) -> tuple[int, int]:
        """How many background rows a step may have, and how many tokens of background prompts.

        Args:
            rows: of others, that decode.
            prompts: tokens of prompts of others.
            background: background rows that are there; the tokens come on top of as many of them as may decode.
        """
        if self._slowdown <= 1:
            return 0, 0
        if prompts and self._passed_over < PASSED_OVER:
            self._passed_over += 1
            return 0, 0
        self._passed_over = 0
        estimate = self._estimate
        if estimate is None:
            return UNLIMITED, UNLIMITED
        if rows and not prompts and self._leaves_out(estimate):
            return 0, 0
        left = (self._slowdown - 1) * estimate.alone(rows, prompts)
        most_rows = estimate.rows_within(rows, left)
        most_tokens = estimate.tokens_within(prompts, left - estimate.row_part(rows, min(most_rows, background)))
        if most_rows or most_tokens:
            return most_rows, most_tokens
        return (1, 0) if background else (0, 1)  # background requests go on, however slow it is

    def _leaves_out(self, estimate: StepEstimate) -> bool:
        self._since_left_out += 1
        if self._since_left_out < (LEFT_OUT if estimate.is_measured else LEFT_OUT_FIRST):
            return False
        self._since_left_out = 0
        return True
