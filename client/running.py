"""The requests in flight of one client, which end with it."""

from __future__ import annotations

import weakref
from typing import Protocol, TypeVar


class _Call(Protocol):
    def cancel(self) -> None: ...


CallT = TypeVar("CallT", bound=_Call)


class RunningCalls:
    """Calls that are still referenced."""

    def __init__(self) -> None:
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        self._has_ended = False

    def add(self, call: CallT) -> CallT:
        """Returns the call, which is cancelled at once if the others have been."""
        self._calls.add(call)
        if self._has_ended:
            call.cancel()
        return call

    def cancel(self) -> None:
        """Ends all calls: their readers get Cancelled."""
        self._has_ended = True
        for call in list(self._calls):
            call.cancel()
