"""Bounds the thoughts of one answer: after `thinking_token_budget` tokens of them their closing tag is forced.

A grammar of the same request holds behind the thoughts.
"""

from __future__ import annotations

from collections import deque

from minisgl_backend.request import ThinkingTags


class ThinkingBudget:
    """Follows one sequence token by token."""

    __slots__ = ("_forced", "_has_grammar", "_inside", "_latest", "_may_open", "_opening_added", "_remaining", "_tags")

    def __init__(self, tags: ThinkingTags, budget: int, *, has_grammar: bool) -> None:
        self._tags = tags
        self._remaining = budget
        self._inside = tags.is_open
        self._has_grammar = has_grammar  # for the thoughts' end
        self._may_open = has_grammar and not tags.is_open  # the first token may open them
        self._opening_added = False  # that token is none of the grammar's
        self._forced: tuple[int, ...] = ()  # the tokens that must come next
        self._latest: deque[int] = deque(maxlen=max(len(tags.opening), len(tags.closing)))
        if self._inside and not self._remaining:
            self._force_end()

    @property
    def forced(self) -> int | None:
        """The token that must come next; None where it may be any, or what the grammar allows."""
        return self._forced[0] if self._forced else None

    @property
    def is_thinking(self) -> bool:
        """The sequence is among its thoughts, where its grammar says nothing."""
        return self._inside

    @property
    def opening(self) -> int | None:
        """A token that may come beside what the grammar allows: it opens the thoughts."""
        return self._tags.opening[0] if self._may_open else None

    def allow_opening(self, *, is_new: bool) -> None:
        """`opening` may be the next token; `is_new`: the grammar would not have allowed it."""
        self._opening_added = is_new

    def accept(self, token: int) -> bool:
        """Follows the sampled token. Returns whether it is one of the answer behind the thoughts."""
        if self._forced:
            self._forced = self._forced[1:]
            if not self._forced and self._may_open:  # what was forced was the rest of the opening tag
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
            self._forced = self._tags.behind if self._has_grammar else ()  # of itself the model writes it, too
            return False
        self._remaining -= 1
        if self._remaining <= 0:
            self._force_end()
        return False

    def _begin(self, token: int) -> bool:
        """The first token of an answer whose grammar waits for thoughts that may come."""
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
        """What of the closing tag is there already is not written again."""
        closing = self._tags.closing
        written = next(n for n in range(len(closing) - 1, -1, -1) if _ends_with(self._latest, closing[:n]))
        self._latest.clear()
        self._forced = (*closing[written:], *self._tags.behind)


def _ends_with(latest: deque[int], tag: tuple[int, ...]) -> bool:
    count = len(tag)
    return len(latest) >= count and all(latest[k - count] == tag[k] for k in range(count))
