"""Images' share of a step beside decoding rows, in time: a photo of a phone takes most of a second of a GPU, and what
a step computes of it is waited for by every stream."""

from __future__ import annotations

import bisect

from minisgl_backend.scheduler.step_estimate import Curve, StepEstimate
from minisgl_backend.step import StepTimes

BESIDE = 0.5  # of what a step of the decoding rows alone takes: how much longer steps may be
_LEAST = 32  # prompt tokens that a step has even so


class ImageShare:
    """Of one step at a time. Without measured times there is no limit."""

    def __init__(self, times: StepTimes | None, multiple: int = 1, context_cost: float = 0.0) -> None:
        """multiple: of tokens, that a chunk has at least; context_cost: `EncoderLimits.context_cost`."""
        self._least, self._context_cost = max(_LEAST, multiple), context_cost
        self._estimate = None if times is None else StepEstimate(times)
        # Here what is free counts as that, unlike in the estimate: chunks are short, and the last ones of few tokens.
        self._prompts = Curve(((0, 0.0),) if times is None else times.prompts, 0.0)
        self._token_s = 0.0 if self._estimate is None else max(self._estimate.token_s, self._prompts.steepest)
        self._left: float | None = None  # seconds; None: no limit
        self._is_fresh = True  # nothing is spent yet

    def in_tokens(self, calls: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        """`StepTimes.encoder`, in prompt tokens that take as long."""
        if self._estimate is None:
            return ()
        return tuple((fixed / self._token_s, of_seen / self._token_s) for fixed, of_seen in calls)

    def begin(self, num_decoding: int, *, is_limited: bool) -> None:
        """A step in which so many rows decode; `is_limited`: no backlog waits."""
        self._left, self._is_fresh = None, True
        if is_limited and num_decoding and self._estimate is not None:
            self._left = BESIDE * self._estimate.alone(num_decoding, 0)

    def prompt_tokens(self, budget: int, start: int) -> int:
        """Of `budget`, for a chunk of a prompt that has images, behind `start` tokens that it attends to."""
        if self._left is None or self._estimate is None:
            return budget
        least = min(budget, self._least if self._is_fresh else 0)
        if self._seconds(budget, start) <= self._left:
            return budget
        return max(least, bisect.bisect(range(budget), self._left, key=lambda count: self._seconds(count + 1, start)))

    def encoding(self, budget: int) -> int:
        """Of `budget`, for encoding, in prompt tokens that multiply as much: rows that decode do not hide it, as they
        do a chunk's first tokens."""
        if self._left is None or self._estimate is None:
            return budget
        return min(budget, int(self._left / self._token_s))

    def spend(self, encoding: int, prompt_tokens: int, start: int) -> None:
        self._is_fresh &= not (encoding or prompt_tokens)
        if self._left is not None and self._estimate is not None:
            taken = encoding * self._token_s + self._seconds(prompt_tokens, start)
            self._left = max(0.0, self._left - taken)

    def _seconds(self, tokens: int, start: int) -> float:
        """Of a chunk behind `start` tokens; its own tokens' attention to each other was timed."""
        assert self._estimate is not None, "only a limited share asks"
        context = tokens * start * self._context_cost * self._token_s
        return self._prompts.seconds(tokens) - self._prompts.seconds(0) + context
