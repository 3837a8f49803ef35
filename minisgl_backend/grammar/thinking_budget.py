"""Limits the reasoning of a sequence: after `thinking_token_budget` tokens its closing tag is forced.

A grammar of the same request applies after the reasoning.
"""

from __future__ import annotations

from collections import deque

from minisgl_backend.request import ThinkingTags


class ThinkingBudget:
    """Tracks one sequence token by token."""

    __slots__ = ("_forced", "_has_grammar", "_inside", "_latest", "_may_open", "_opening_added", "_remaining", "_tags")

    def __init__(self, tags: ThinkingTags, budget: int, *, has_grammar: bool) -> None:
        self._tags = tags
        self._remaining = budget
        self._inside = tags.is_open
        self._has_grammar = has_grammar  # which applies once the reasoning has ended
        self._may_open = has_grammar and not tags.is_open  # the first token may open the reasoning
        self._opening_added = False  # the grammar itself does not allow the opening token
        self._forced: tuple[int, ...] = ()  # the tokens that must come next
        self._latest: deque[int] = deque(maxlen=max(len(tags.opening), len(tags.closing)))
        if self._inside and not self._remaining:
            self._force_end()

    @property
    def forced(self) -> int | None:
        """The token that must come next; None: any token, or any that the grammar allows."""
        return self._forced[0] if self._forced else None

    @property
    def is_thinking(self) -> bool:
        """The sequence is reasoning, so its grammar does not apply."""
        return self._inside

    @property
    def opening(self) -> int | None:
        """The token that opens the reasoning, if it is allowed next in addition to those of the grammar."""
        return self._tags.opening[0] if self._may_open else None

    def allow_opening(self, *, is_new: bool) -> None:
        """The mask of the next token allows `opening`; `is_new`: the grammar itself does not."""
        self._opening_added = is_new

    def accept(self, token: int) -> bool:
        """Advances by the sampled token. Returns whether it belongs to the answer after the reasoning."""
        if self._forced:
            self._forced = self._forced[1:]
            if not self._forced and self._may_open:  # the rest of the opening tag was forced
                self._may_open = False
                self._open()
            elif not self._forced:
                self._inside = False
            return False
        if self._may_open:
            return self._begin(token)
        if self._has_grammar and not self._inside:
            return True
        self._latest.append(token)
        if not self._inside:
            if _ends_with(self._latest, self._tags.opening):
                self._open()
            return True
        if _ends_with(self._latest, self._tags.closing):
            self._inside = False
            self._latest.clear()
            # Without a grammar the model writes what follows the tag by itself.
            self._forced = self._tags.behind if self._has_grammar else ()
            return False
        self._remaining -= 1
        if self._remaining <= 0:
            self._force_end()
        return False

    def _begin(self, token: int) -> bool:
        """The first token of a sequence with a grammar, which may open the reasoning or begin the answer."""
        if not (self._opening_added and token == self._tags.opening[0]):
            self._may_open = False
            return True
        self._forced = self._tags.opening[1:]
        if not self._forced:
            self._may_open = False
            self._open()
        return False

    def _open(self) -> None:
        self._inside = True
        self._latest.clear()
        if self._remaining <= 0:
            self._force_end()

    def _force_end(self) -> None:
        """Forces the closing tag, without the tokens of it that are already generated."""
        closing = self._tags.closing
        written = next(n for n in range(len(closing) - 1, -1, -1) if _ends_with(self._latest, closing[:n]))
        self._latest.clear()
        self._forced = (*closing[written:], *self._tags.behind)


def _ends_with(latest: deque[int], tag: tuple[int, ...]) -> bool:
    count = len(tag)
    return len(latest) >= count and all(latest[k - count] == tag[k] for k in range(count))
