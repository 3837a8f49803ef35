"""Token bitmasks for the positions after draft tokens, which one step verifies together.

A draft may be wrong, so errors and delays in masks after drafts must not end the sequence or refuse the grammar: a
position without a mask is not accepted, and is sampled in the next step, as it would be without drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from minisgl_backend.arrays import Int32Array
from minisgl_backend.request import Grammar

MAX_DRAFT_MASKS_S = 0.02  # for all masks after drafts of one step


class DraftMasks:
    """Used by the step loop alone."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.unmasked: list[int] = []  # result indices of the step without a mask, whose tokens must not be accepted

    def begin(self) -> None:
        """Begins a new step."""
        self.unmasked = []

    def fill(
        self,
        drafted: list[tuple[int, int, int]],
        matchers: Mapping[int, Any],
        grammars: Mapping[int, Grammar],
        bitmask: Int32Array,
    ) -> list[int]:
        """drafted: (result index, uid, draft token before that result), in order for each sequence. matchers and
        grammars: by uid. bitmask: int32 [len(drafted) or more, ceil(vocab / 32)], whose first rows are filled.

        Returns the result indices of these rows. The matchers accept the drafts and are rolled back.
        """
        indices: list[int] = []
        accepted: dict[int, int] = {}  # uid -> drafts that its matcher has accepted
        stopped: set[int] = set()  # uids whose further drafts are not masked
        end = self._clock() + MAX_DRAFT_MASKS_S
        for index, uid, draft in drafted:
            matcher = matchers.get(uid)
            if matcher is None or uid in stopped:
                self.unmasked.append(index)
                continue
            try:
                if self._clock() < end and not has_token_limit(grammars[uid]) and matcher.accept_token(draft):
                    accepted[uid] = accepted.get(uid, 0) + 1
                    if not matcher.is_terminated():
                        matcher.fill_next_token_bitmask(bitmask, len(indices))
                        indices.append(index)
                        continue
            except Exception:  # whatever xgrammar raises; if the draft is right, the next step's mask raises it again
                pass
            stopped.add(uid)
            self.unmasked.append(index)
        for uid, count in accepted.items():
            matchers[uid].rollback(count)
        return indices


def has_token_limit(grammar: Grammar) -> bool:
    """Whether the grammar limits the tokens of a text. Such a matcher cannot be rolled back: while it fills a mask, it
    records that the text must end with the next token, and a rollback loses that."""
    return grammar.kind == "structural_tag" and '"max_tokens"' in grammar.text
