"""Masks of what may follow drafts, which a step verifies together.

A draft may be wrong, so nothing that is met behind one may harm its sequence or its grammar: what cannot be masked, or
not in time, is not accepted, and comes with the next step as it would have without drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from minisgl_backend.arrays import Int32Array
from minisgl_backend.request import Grammar

MAX_DRAFT_MASKS_S = 0.02  # that masks behind drafts may take of a step, all together


class DraftMasks:
    """Used by the step loop alone."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.unmasked: list[int] = []  # result indices of the step that have no mask: nothing there may be accepted

    def begin(self) -> None:
        """Another step's masks come."""
        self.unmasked = []

    def fill(
        self,
        drafted: list[tuple[int, int, int]],
        matchers: Mapping[int, Any],
        grammars: Mapping[int, Grammar],
        bitmask: Int32Array,
    ) -> list[int]:
        """drafted: (result index, uid, the draft that the result is behind), those of a row in order. matchers and
        grammars: by uid. bits [len(drafted) or more, ceil(vocab / 32)]: its first lines are filled.

        Returns the result indices of these lines. The matchers follow the drafts and are rolled back.
        """
        indices: list[int] = []
        accepted: dict[int, int] = {}  # uid -> drafts that its matcher has accepted
        stopped: set[int] = set()  # uids of which no further draft is followed
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
            except Exception:  # whatever the library raises; if the draft is right, it raises it again without one
                pass
            stopped.add(uid)
            self.unmasked.append(index)
        for uid, count in accepted.items():
            matchers[uid].rollback(count)
        return indices


def has_token_limit(grammar: Grammar) -> bool:
    """xgrammar's matcher notes while it fills a mask that such a text must end with the next token; rolled back, it
    has lost the note."""
    return grammar.kind == "structural_tag" and '"max_tokens"' in grammar.text
