"""Images' share of a step beside decoding rows, in time: a photo of a phone takes most of a second of a GPU, and what
a step computes of it is waited for by every stream.

Encoding is cut as finely as it takes. A prompt's chunks are not: a step that has one takes twice a decode step, however
few tokens it has, since it is launched piece by piece, and a GPU attends to 10,000 tokens as long for 100 as for 500.
So a prompt whose images are encoded is computed in few long steps, one in EVERY at most: of a hundred tokens of a
stream ninety-nine come as soon as they did.
"""

from __future__ import annotations

import bisect

from minisgl_backend.scheduler.step_estimate import StepEstimate

BESIDE = 0.5  # of what a step of the decoding rows alone takes: how much longer steps may be
EVERY = 150  # steps beside decoding rows, of which one may be long
LONG_S = 0.2  # seconds that it may take
_MOST_SAVED = 4  # long steps that short ones have made room for
_LEAST = 32  # prompt tokens that a step has even so


class ImageShare:
    """Of one step at a time. Without measured times there is no limit."""

    def __init__(self, estimate: StepEstimate | None, multiple: int = 1, context_cost: float = 0.0) -> None:
        """estimate: of `MeasuredSteps`; multiple: of tokens, that a chunk has at least; context_cost:
        `EncoderLimits.context_cost`."""
        self._least, self._context_cost = max(_LEAST, multiple), context_cost
        self._estimate = estimate
        # What costs are counted in stays as it was at start, when the encoder was timed too.
        self._token_s = 0.0 if estimate is None else estimate.steepest_token_s
        self._short, self._step = _MOST_SAVED * EVERY, 0  # short steps that no long one has followed, and the last step
        self._left: float | None = None  # seconds; None: no limit
        self._is_fresh = True  # nothing is spent yet

    def encoder_calls(self) -> tuple[tuple[float, float], ...]:
        """`StepTimes.encoder`, in prompt tokens that take as long."""
        if self._estimate is None:
            return ()
        return tuple((fixed / self._token_s, of_seen / self._token_s) for fixed, of_seen in self._estimate.encoder)

    def begin(self, step: int, num_decoding: int, *, is_limited: bool) -> None:
        """A step in which so many rows decode; `is_limited`: no backlog waits."""
        self._left, self._is_fresh = None, True
        self._short = min(self._short + step - self._step, _MOST_SAVED * EVERY)
        self._step = step
        if is_limited and num_decoding and self._estimate is not None:
            self._left = BESIDE * self._estimate.alone(num_decoding, 0)

    def long_chunk(self, most: int, start: int) -> int:
        """Tokens, `most` at most, of a chunk behind `start` tokens in a long step; 0: none is due."""
        if self._left is None or self._short < EVERY:
            return 0
        return bisect.bisect(range(most), LONG_S, key=lambda count: self._seconds(count + 1, start))

    def begin_long(self) -> None:
        """This step is one."""
        self._short -= EVERY
        self._left = LONG_S

    def prompt_tokens(self, budget: int, start: int) -> int:
        """Of `budget`, for a chunk of a prompt that has images, behind `start` tokens that it attends to."""
        if self._left is None:
            return budget
        least = min(budget, self._least if self._is_fresh else 0)
        if self._seconds(budget, start) <= self._left:
            return budget
        return max(least, bisect.bisect(range(budget), self._left, key=lambda count: self._seconds(count + 1, start)))

    def encoding(self, budget: int) -> int:
        """Of `budget`, for encoding, in prompt tokens that multiply as much: rows that decode do not hide it, as they
        do a chunk's first tokens. Something as long as the step has nothing else of prompts: else an image would wait
        for ever where one token takes longer."""
        if self._left is None:
            return budget
        return min(budget, max(int(self._left / self._token_s), int(self._is_fresh)))

    def spend(self, encoding: int, prompt_tokens: int, start: int) -> None:
        self._is_fresh &= not (encoding or prompt_tokens)
        if self._left is not None:
            taken = encoding * self._token_s + self._seconds(prompt_tokens, start)
            self._left = max(0.0, self._left - taken)

    def _seconds(self, tokens: int, start: int) -> float:
        """Of a chunk behind `start` tokens."""
        context = tokens * (start + tokens / 2) * self._context_cost * self._token_s
        return context + (0.0 if self._estimate is None else self._estimate.chunk_part(tokens))
