"""Images' share of a step beside decoding rows, in time: a photo of a phone takes most of a second of a GPU, and what
a step computes of it is waited for by every stream."""

from __future__ import annotations

from minisgl_backend.scheduler.step_estimate import StepEstimate
from minisgl_backend.step import StepTimes

BESIDE = 0.45  # of what a step of the decoding rows alone takes: how much longer steps may be
_LEAST = 32  # prompt tokens that a step has even so


class ImageShare:
    """Of one step at a time. Without measured times there is no limit."""

    def __init__(self, times: StepTimes | None, multiple: int = 1) -> None:
        """multiple: of tokens, that a chunk has at least."""
        self._least = max(_LEAST, multiple)
        self._estimate = None if times is None else StepEstimate(times)
        self._left: float | None = None  # seconds; None: no limit
        self._is_fresh = True  # nothing is spent yet

    def begin(self, num_decoding: int, *, is_limited: bool) -> None:
        """A step in which so many rows decode; `is_limited`: no backlog waits."""
        self._left, self._is_fresh = None, True
        if is_limited and num_decoding and self._estimate is not None:
            self._left = BESIDE * self._estimate.alone(num_decoding, 0)

    def prompt_tokens(self, budget: int) -> int:
        """Of `budget`, for chunks of prompts that have images."""
        if self._left is None or self._estimate is None:
            return budget
        least = self._least if self._is_fresh else 0
        return min(budget, max(least, self._estimate.tokens_within(0, self._left)))

    def encoding(self, budget: int) -> int:
        """Of `budget`, for encoding, in prompt tokens that multiply as much: rows that decode do not hide it, as they
        do a chunk's first tokens."""
        if self._left is None or self._estimate is None:
            return budget
        return min(budget, int(self._left / self._estimate.token_s))

    def spend(self, encoding: int, prompt_tokens: int) -> None:
        self._is_fresh &= not (encoding or prompt_tokens)
        if self._left is not None and self._estimate is not None:
            taken = encoding * self._estimate.token_s + self._estimate.prompt_part(prompt_tokens)
            self._left = max(0.0, self._left - taken)
