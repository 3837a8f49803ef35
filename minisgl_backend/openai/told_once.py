"""Names that clients send, and that the log tells once each."""

from __future__ import annotations

_MOST_NAMES = 256  # a client can make up any number
_MOST_CHARACTERS = 60  # of one that are compared


class ToldOnce:
    """What was told already. Bounded: names beyond the bound are never told."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def is_new(self, name: str) -> bool:
        """True once for each name."""
        start = name[:_MOST_CHARACTERS]
        if start in self._told or len(self._told) >= _MOST_NAMES:
            return False
        self._told.add(start)
        return True
