"""Names from clients that are logged once each."""

from __future__ import annotations

_MAX_NAMES = 256  # clients can invent any number
_MAX_CHARACTERS = 60  # characters of a name that are compared


class LogOnce:
    """Remembers names that were logged, up to a limit; further names are never logged."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def is_new(self, name: str) -> bool:
        """True once for each name."""
        start = name[:_MAX_CHARACTERS]
        if start in self._logged or len(self._logged) >= _MAX_NAMES:
            return False
        self._logged.add(start)
        return True
