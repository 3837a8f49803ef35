"""The requests in flight of one client, which end with it."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol, TypeVar


class _Call(Protocol):
    def cancel(self) -> None: ...


CallT = TypeVar("CallT", bound=_Call)


class RunningCalls:
    """Calls that are still referenced. Thread-safe."""

    def __init__(self) -> None:
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._has_ended = False

    def add(self, call: CallT) -> CallT:
        """Returns the call, which is cancelled at once if the others have been."""
        with self._lock:
            self._calls.add(call)
            too_late = self._has_ended
        if too_late:
            call.cancel()
        return call

    def cancel(self) -> None:
        """Ends all calls: their readers get Cancelled."""
        with self._lock:
            self._has_ended = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()
