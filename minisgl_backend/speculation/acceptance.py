"""How often drafts have been right of late."""

from __future__ import annotations

import numpy as np

from minisgl_backend.arrays import Float64Array

WEIGHT = 0.2  # of the newest draft
FIRST_FOUND, FIRST_RATE = 0.5, 0.8  # before anything is known
PROOF = 4  # tokens of its own proposals that were right, from which on a sequence is taken at its word
UNPROVEN_RATE = 0.3  # until then, where drafts cost much


class Acceptance:
    """Of one sequence, or of all: decaying means."""

    __slots__ = ("_proof", "found", "rates")

    def __init__(self, most: int, like: Acceptance | None = None) -> None:
        """`most`: drafts of one row in one step; `like`: what is expected before something is known."""
        self._proof = 0  # tokens that were right
        # share of the steps for which something was proposed
        self.found: float = FIRST_FOUND if like is None else like.found
        # [most]  that a draft is right where all before it are
        self.rates: Float64Array = np.full(most, FIRST_RATE) if like is None else like.rates.copy()

    def note_found(self, found: bool) -> None:
        """Something was proposed, or nothing."""
        self.found += WEIGHT * (found - self.found)

    def note(self, drafted: int, accepted: int) -> None:
        """So many drafts, 1 or more, were verified, and the first ones of them accepted."""
        self._proof += accepted
        rates = self.rates
        rates[:accepted] += WEIGHT * (1.0 - rates[:accepted])
        if accepted < drafted:
            rates[accepted] -= WEIGHT * rates[accepted]
        else:  # those behind would hardly be worse
            rates[drafted:] += 0.5 * WEIGHT * (rates[drafted - 1] - rates[drafted:])

    def all_right(self, count: int, *, costly: bool = False) -> Float64Array:
        """Of each of the first `count` drafts, that it and all before it are right; [count]. `costly`: a wrong one
        costs much, so that others' experience is not enough."""
        rates = self.rates[:count]
        if costly and self._proof < PROOF:
            rates = np.minimum(rates, UNPROVEN_RATE)
        rights: Float64Array = np.cumprod(rates)
        return rights
